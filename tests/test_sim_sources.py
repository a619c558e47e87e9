"""Where simulated traffic comes from: every published layout, every way a real file is bad, and what is drawn."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from headway.bench.sim import recording  # noqa: E402
from headway.bench.sim.arrivals import Arrivals, TraceError  # noqa: E402
from headway.bench.sim.recording import Record  # noqa: E402
from headway.bench.sim.sources import open_source  # noqa: E402
from headway.bench.sim.synthetic import ClosedLoop  # noqa: E402
from headway.scheduler import tape  # noqa: E402

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
TRACES = next((p / "shared/traces" for p in Path(__file__).parents if (p / "shared/traces").is_dir()), None)
MS = 1_000_000


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Arrivals]:
    """Write a file and open it."""

    def reader(content: str | bytes, name: str = "trace.csv", **settings: float) -> Arrivals:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        load = open_source(str(path), **settings)  # type: ignore[arg-type]
        assert isinstance(load, Arrivals)
        return load

    return reader


def columns(load: Arrivals) -> list[list[int]]:
    return [column.tolist() for column in (load.at_ns, load.tokens, load.max_new)]


# ---------------------------------------------------------------- layouts


def test_azure(read: Callable[..., Arrivals]) -> None:
    load = read(AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,3180,8\n")
    assert columns(load) == [[0, 52_000_100], [4808, 3180], [10, 8]]
    assert load.notes == ()


def test_azure_with_a_time_zone(read: Callable[..., Arrivals]) -> None:
    load = read(AZURE + "2024-05-10 23:59:59.5+00:00,1,2\n2024-05-11T00:00:00.25Z,3,4\n")
    assert load.at_ns.tolist() == [0, 750 * MS]


def test_burstgpt(read: Callable[..., Arrivals]) -> None:
    load = read(BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n")
    assert columns(load) == [[0, 40_000 * MS], [472, 1087], [18, 230]]
    assert (load.tenants, load.tenant.tolist()) == (("ChatGPT", "GPT-4"), [0, 1])
    assert load.notes == ("times began at 5.000 s; shifted to 0",)


def test_vidur(read: Callable[..., Arrivals]) -> None:
    assert columns(read("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,7,2\n0.5,8,3\n")) == [
        [0, 500 * MS],
        [7, 8],
        [2, 3],
    ]


def test_mooncake_counts_milliseconds_and_bailian_seconds(read: Callable[..., Arrivals]) -> None:
    rows = [{"timestamp": at, "input_length": 5, "output_length": 6, "hash_ids": [1]} for at in (0, 3)]
    text = "\n".join(map(json.dumps, rows))
    assert read(text, "a.jsonl").at_ns.tolist() == [0, 3 * MS]
    text = "\n".join(json.dumps(row | {"turn": 1, "type": "text"}) for row in rows)
    assert read(text, "b.jsonl").at_ns.tolist() == [0, 3000 * MS]


# ---------------------------------------------------------------- files as they are

PLAIN = [[0, 1000 * MS], [10, 20], [1, 2]]


@pytest.mark.parametrize(
    "content",
    [
        AZURE + "0,10,1\n1,20,2\n",
        AZURE + "0,10,1\n1,20,2",
        "\ufeff" + AZURE + "0,10,1\n1,20,2\n",
        (AZURE + "0,10,1\n1,20,2\n").replace("\n", "\r\n"),
        "\n\n" + AZURE + "\n0,10,1\n\n1,20,2\n , ,\n\n",
        (AZURE + "0,10,1\n1,20,2\n").replace(",", ";"),
        (AZURE + "0,10,1\n1,20,2\n").replace(",", "\t"),
        "TIMESTAMP;ContextTokens;GeneratedTokens\n0,0;10;1\n1,0;20;2\n",
        '"TIMESTAMP","ContextTokens","GeneratedTokens"\n"0","10","1"\n"1.0", "20" ,"2"\n',
        "id,GeneratedTokens,more,timestamp,ContextTokens\nx,1,,0,10\ny,2,,1,20\n",
        AZURE + "1700000000,10,1\n1700000001,20,2\n",
        AZURE + "-5,10,1\n-4,20,2\n",
        AZURE + "1,20,2\n0,10,1\n",
    ],
    ids=[
        *("plain", "no_newline", "bom", "crlf", "blank", "semicolons", "tabs", "commas_in_numbers"),
        *("quoted", "extra", "epoch", "negative", "unsorted"),
    ],
)
def test_a_real_file_is_read(read: Callable[..., Arrivals], content: str) -> None:
    assert columns(read(content)) == PLAIN


def test_what_was_done_to_a_file_is_said(read: Callable[..., Arrivals]) -> None:
    load = read(AZURE + "-1,1,5\n-3,2,0\n-3,3,5\n")
    assert columns(load) == [[0, 0, 2000 * MS], [2, 3, 1], [0, 5, 5]]
    assert load.notes == (
        "1 rows were earlier than the row before; sorted by time",
        "times began at -3.000 s; shifted to 0",
        "1 answers have no tokens; an engine that generates needs one step for each",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        (AZURE, "there is no request in it"),
        ("TIMESTAMP,Tokens\n0,1\n", "missing columns: ContextTokens, GeneratedTokens; found: TIMESTAMP, Tokens"),
        (AZURE + "0,10,1\n1,20\n", "line 3: 2 columns, where the header has 3"),
        (AZURE + "0,ten,1\n", "line 2: 'ten' is not a number"),
        (AZURE + "0,,1\n", "line 2: '' is not a number"),
        (AZURE + "0,-1,1\n", "line 2: '-1' is not a number of at least 0"),
        (AZURE + "0,nan,1\n", "line 2: 'nan' is not a number of at least 0"),
        (AZURE + "soon,1,1\n", "line 2: 'soon' is neither a time nor a number"),
        (AZURE + "2023-13-45 00:00:00,1,1\n", "line 2: "),
        (AZURE + "1e999,1,1\n", "line 2: "),
        (AZURE + "0,1,1\n2000000000,1,1\n", "the times span more than 36 years"),
        (b"\xff\xfe\x00a\n", "not UTF-8 text"),
        (
            '{"timestamp": 0, "input_length": 1}\n',
            "line 1: missing keys: output_length; found: timestamp, input_length",
        ),
        ('{"timestamp": 0\n', "line 1: not JSON"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[]\n', "line 2: not a JSON object"),
        ("window_start_s,rate_rps,cv,pattern,shape\n0,1,1,Gamma,1\n", "missing columns: scale"),
        ("window_start_s,rate_rps,pattern,shape,scale\n0,1,Zipf,1,1\n", "'Zipf' is neither Gamma nor Weibull"),
        ("window_start_s,rate_rps,pattern,shape,scale\n0,0,,0,0\n", "no window has any arrivals"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(read: Callable[..., Arrivals], content: str | bytes, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(content)
    assert said in str(caught.value)
    assert "trace.csv" in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    for name, said in ((str(tmp_path), "a folder"), (str(tmp_path / "a"), "no such file"), ("poison", "poisson")):
        with pytest.raises(TraceError, match=said):
            open_source(name)


# ---------------------------------------------------------------- recordings

RECORDS = [
    Record(1, 5_000, 10),
    Record(1, 7_000, 70_000, max_new=3, tenant="ä", priority=-2, deadline_ms=250, kind="generate"),
    Record(1, 9_000, 20, tenant="ä" * 300),
]


def test_a_recording_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.msgpack"
    recording.write(path, RECORDS)
    assert recording.records(path) == (RECORDS, False)
    load = open_source(str(path))
    assert isinstance(load, Arrivals)
    assert columns(load) == [[0, 2000, 4000], [10, 70_000, 20], [0, 3, 0]]
    assert (load.deadline_ns.tolist(), load.priority.tolist()) == ([0, 250 * MS, 0], [0, -2, 0])
    assert load.tenants == ("", "ä", "ä" * 300)


def test_a_recording_is_plain_msgpack(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgpack")
    path = tmp_path / "a.msgpack"
    recording.write(path, RECORDS)
    with path.open("rb") as file:
        assert [one["at_ns"] for one in msgpack.Unpacker(file)] == [5_000, 7_000, 9_000]


def test_a_recording_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.msgpack"
    recording.write(path, RECORDS)
    data = path.read_bytes()
    ends = list(tape.ends(io.BytesIO(data), ""))
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        assert recording.records(path) == (RECORDS[:whole], length not in (0, *ends))


def test_unknown_keys_are_skipped_and_wrong_records_are_not(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgpack")
    path = tmp_path / "a.msgpack"
    extra = {"x": [1, {"y": b"z" * 300}, 1.5, None, True, "s" * 40, -5, 1 << 40], "m": {str(i): i for i in range(20)}}
    path.write_bytes(msgpack.packb({"v": 1, "at_ns": 1, "tokens": 2} | extra))
    assert recording.records(path) == ([Record(1, 1, 2)], False)
    for wrong in ({"v": 2, "at_ns": 1, "tokens": 1}, {"v": 1, "at_ns": 1}, {"v": 1, "at_ns": 1, "tokens": -1}):
        path.write_bytes(msgpack.packb(wrong))
        with pytest.raises(TraceError, match="byte 0"):
            recording.records(path)
    path.write_bytes(b"\xc1")
    with pytest.raises(TraceError, match="byte 0: no msgpack"):
        recording.records(path)


# ---------------------------------------------------------------- drawn


def test_poisson_is_poisson() -> None:
    load = open_source("poisson:rps=50,n=20000,tokens=128,spread=0.5")
    assert isinstance(load, Arrivals)
    gaps = np.diff(load.at_ns)
    assert load.rate_rps == pytest.approx(50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert float(np.median(load.tokens)) == pytest.approx(128, rel=0.05)


def test_pulses_are_pulses() -> None:
    load = open_source("pulses:burst=4,span_ms=10,idle_ms=90,n=40")
    assert isinstance(load, Arrivals)
    apart = np.diff(load.at_ns)[3::4] / MS
    assert len(load) == 40
    assert (apart > 80).all()
    assert (np.delete(np.diff(load.at_ns), slice(3, None, 4)) < 10 * MS).all()


def test_on_off_and_steps() -> None:
    load = open_source("onoff:rps=100,on_ms=100,off_ms=300,n=20000")
    assert isinstance(load, Arrivals)
    assert load.rate_rps == pytest.approx(25, rel=0.15)
    load = open_source("steps:rates=10/100/10,each_s=20")
    assert isinstance(load, Arrivals)
    counts = np.histogram(load.at_ns / 1e9, bins=[0, 20, 40, 60])[0]
    assert counts.tolist() == pytest.approx([200, 2000, 200], rel=0.25)


def test_the_same_seed_draws_the_same() -> None:
    for source in ("poisson:n=50", "pulses:n=50", "onoff:n=50", "steps:rates=9/2,each_s=3"):
        one, same, other = (open_source(source, seed=seed) for seed in (3, 3, 4))
        assert isinstance(one, Arrivals)
        assert isinstance(same, Arrivals)
        assert isinstance(other, Arrivals)
        assert (one.at_ns.tolist() == same.at_ns.tolist(), one.at_ns.tolist() == other.at_ns.tolist()) == (True, False)


def test_servegen_draws_its_windows(tmp_path: Path) -> None:
    rows = ["client,window_start_s,rate_rps,cv,pattern,shape,scale"]
    rows += ["0,0,0.1,1,Gamma,1,10", "0,600,10,2,Gamma,0.25,0.4", "7,600,5,1,Weibull,1,0.2"]
    path = tmp_path / "x_arrivals.csv"
    path.write_text("\n".join(rows))
    histogram = {"input_tokens": [[3], [1.0]], "output_tokens": [[4, 5], [0.5, 0.5]]}
    (tmp_path / "x_lengths_t0.jsonl").write_text(json.dumps({"client": 7, "window_start_s": 600} | histogram))
    load = open_source(str(path), span_s=600.0)
    assert isinstance(load, Arrivals)
    counts = np.bincount(load.tenant)
    assert load.tenants == ("client 0", "client 7")
    assert counts.tolist() == pytest.approx([6000, 3000], rel=0.1)
    assert (set(load.tokens.tolist()), set(load.max_new.tolist())) == ({3}, {4, 5})
    assert "x_lengths_t0.jsonl" in load.notes[-1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("poisson:n=0", "n must be at least 1"),
        ("poisson:rps=0", "rps must be more than 0"),
        ("poisson:rate=5", "'rate=5' is no setting; there are rps, n, tokens"),
        ("poisson:n", "is no setting"),
        ("pulses:burst=x", "burst: 'x' is not a number"),
        ("closed:clients=0", "clients must be at least 1"),
        ("steps:rates=1/0", "rates must be more than 0"),
    ],
)
def test_settings_that_make_no_sense(source: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        open_source(source)


# ---------------------------------------------------------------- what may be done to a load


def test_cut_and_speed() -> None:
    load = open_source("poisson:n=1000")
    assert isinstance(load, Arrivals)
    faster = load.at_rate(500)
    assert faster.rate_rps == pytest.approx(500, rel=1e-6)
    assert (np.diff(faster.at_ns) * 10 - np.diff(load.at_rate(50).at_ns)).max() <= 20
    part = load.cut(start_s=2, span_s=3, limit=20)
    assert (len(part), int(part.at_ns[0])) == (20, 0)
    with pytest.raises(TraceError, match="nothing is left"):
        load.cut(start_s=1e6)
    with pytest.raises(TraceError, match="no rate that could be set"):
        load.cut(limit=1).at_rate(5)
    with pytest.raises(TraceError, match="cannot be cut"):
        open_source("closed:n=10", limit=5)
    assert isinstance(open_source("closed:n=10"), ClosedLoop)


@pytest.mark.skipif(TRACES is None, reason="shared/traces is not there")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8_819),
        ("AzureLLMInferenceTrace_conv.csv", 19_366),
        ("mooncake_conversation_first.jsonl", 5_751),
        ("mooncake_synthetic_trace.jsonl", 3_993),
    ],
)
def test_the_real_traces_are_read_whole(name: str, rows: int) -> None:
    assert TRACES is not None
    load = open_source(str(TRACES / name))
    assert isinstance(load, Arrivals)
    assert len(load) == rows
    assert load.at_ns[0] == 0
    assert (np.diff(load.at_ns) >= 0).all()


@pytest.mark.skipif(TRACES is None, reason="shared/traces is not there")
def test_real_servegen_is_bursty_in_one_client() -> None:
    assert TRACES is not None
    load = open_source(str(TRACES / "servegen_m-large_client0_arrivals.csv"), span_s=600.0)
    assert isinstance(load, Arrivals)
    gaps = np.diff(load.at_ns)
    assert gaps.std() / gaps.mean() > 1.5
