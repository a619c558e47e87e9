"""What is sent when: a load made into shots, and prompts of exact length."""

from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from headway.bench.replay import prompts  # noqa: E402
from headway.bench.replay.plan import Shaping, Shot, opened  # noqa: E402
from headway.bench.replay.targets import How, Requests  # noqa: E402
from headway.bench.sim import recording  # noqa: E402
from headway.bench.sim.arrivals import TraceError  # noqa: E402
from headway.bench.sim.recording import Record  # noqa: E402
from headway.scheduler import link, wire  # noqa: E402
from headway.scheduler.config import ConfigError  # noqa: E402

MS = 1_000_000
ROWS = [(second, 10 + second, second % 4) for second in range(20)]
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def trace(rows: list[tuple[int, int, int]], head: str = HEAD) -> str:
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n"


# ---------------------------------------------------------------- files as spreadsheets leave them


@pytest.mark.parametrize(
    "content",
    [
        trace(ROWS),
        "\ufeff" + trace(ROWS).replace("\n", "\r\n"),
        trace(ROWS).rstrip("\n"),
        trace(ROWS).replace("\n", "\n\n"),
        trace(ROWS[7:] + ROWS[:7]),
        "\n".join(["x," + HEAD + ",y", *(f"1,{a},{b},{c}," for a, b, c in ROWS)]),
        "\n".join([HEAD, *(f'"{a}","{b}","{c}"' for a, b, c in ROWS)]),
    ],
    ids=["plain", "mark_crlf", "no_final_newline", "blank_lines", "shuffled", "extra_columns", "quoted"],
)
def test_one_trace_in_seven_files_is_one_replay(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.csv").write_bytes(content.encode())
    load = opened(str(tmp_path / "t.csv"), Shaping())
    assert [(shot.at_ns // (1000 * MS), shot.tokens, shot.max_new) for shot in load.shots("generate")] == ROWS
    assert any("sorted by time" in note for note in load.notes) == ("\n7,17,3\n" in content[:60])


def test_equal_times_keep_their_order_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(trace([(5, 1, 1), (3, 2, 1), (3, 3, 1), (5, 4, 1)]))
    assert [shot.tokens for shot in opened(str(tmp_path / "t.csv"), Shaping()).shots("call")] == [2, 3, 1, 4]


def test_a_missing_column_is_named_beside_those_found(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,More\n1,2,3\n")
    with pytest.raises(TraceError, match="missing columns: GeneratedTokens; found: TIMESTAMP, ContextTokens, More"):
        opened(str(tmp_path / "t.csv"), Shaping())


# ---------------------------------------------------------------- what may be done to a load


def shots(source: str = "poisson:rps=100,n=400,tokens=100,max_new=20", kind: str = "generate", **how: object) -> list:  # type: ignore[type-arg]
    return opened(source, Shaping(**how)).shots(kind)  # type: ignore[arg-type]


def test_speed_and_rate() -> None:
    plain, twice = shots(), shots(speed=2.0)
    assert [shot.at_ns for shot in twice] == [pytest.approx(shot.at_ns / 2, abs=1) for shot in plain]
    assert shots(rate_rps=1.0)[-1].at_ns == pytest.approx(399 * 1000 * MS)
    assert [shot.at_ns for shot in shots(rate_rps=50.0, pattern="fixed")[:3]] == [0, 20 * MS, 40 * MS]
    gaps = np.diff([shot.at_ns for shot in shots(rate_rps=50.0, pattern="poisson")])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.25)


def test_a_sample_keeps_times_and_order() -> None:
    everything = [shot.at_ns for shot in shots()]
    some = [shot.at_ns for shot in shots(sample=0.25)]
    assert 60 < len(some) < 140
    assert any(set(some) <= {at - first for at in everything} for first in everything)
    assert some == [shot.at_ns for shot in shots(sample=0.25)]


def test_lengths() -> None:
    assert {(s.tokens, s.max_new) for s in shots(input_scale=0.5, output_scale=3.0)} == {(50, 60)}
    assert {(s.tokens, s.max_new) for s in shots(input_scale=0.001, output_max=7)} == {(1, 7)}
    assert {s.max_new for s in shots("poisson:n=10,max_new=0", output_scale=9.0)} == {0}


def test_who_cancels_reads_slowly_and_has_which_tenant() -> None:
    made = shots(cancel_share=0.2, cancel_ms=50.0, slow_share=0.1, tenants=3, deadline_ms=70, priority=-2)
    assert 50 < sum(shot.cancel_ms == 50.0 for shot in made) < 110
    assert 20 < sum(shot.slow for shot in made) < 60
    assert {shot.tenant for shot in made} == {"t0", "t1", "t2"}
    assert {(shot.deadline_ms, shot.priority) for shot in made} == {(70, -2)}
    others = shots(slow_share=0.1)
    assert [shot.slow for shot in others] == [shot.slow for shot in made], "one option does not change another's draw"


def test_a_recording_keeps_kinds_contents_and_deadlines(tmp_path: Path) -> None:
    path = tmp_path / "r.msgpack"
    kept = Record(1, 9_000, 3, tenant="a", priority=2, deadline_ms=250, kind="embed", ids=link.pack_ids([7, 8, 9]))
    recording.write(path, [Record(1, 10_000, 5, payload=b"\xc0", kind="call"), kept])
    first, second = opened(str(path), Shaping()).shots("generate")
    assert (first.kind, first.ids, first.tenant, first.priority, first.deadline_ms) == ("embed", [7, 8, 9], "a", 2, 250)
    assert (second.kind, second.payload, second.at_ns) == ("call", b"\xc0", 1000)
    [scaled, _] = opened(str(path), Shaping(input_scale=2.0)).shots("generate")
    assert (scaled.tokens, scaled.ids) == (6, None), "another length has another content"


def test_a_closed_loop_sets_its_own_speed() -> None:
    load = opened("closed:clients=3,think_ms=4,n=10", Shaping())
    assert (load.clients, load.think_ns, load.rate_rps) == (3, 4 * MS, None)
    with pytest.raises(TraceError, match="a closed loop sets its own speed"):
        opened("closed:n=10", Shaping(speed=2.0))
    assert opened("poisson:n=10", Shaping(), clients=2).mode.startswith("closed loop, 2 clients")


# ---------------------------------------------------------------- prompts


def test_ids_are_exact_and_the_same_each_time() -> None:
    assert len(prompts.ids(4, 1000)) == 1000
    assert prompts.ids(4, 50) == prompts.ids(4, 50) != prompts.ids(5, 50) != prompts.ids(5, 50, seed=1)
    assert set(prompts.ids(0, 5000)) == set(range(prompts.LOWEST, prompts.HIGHEST))


def test_a_pair_of_texts_shares_its_tokens() -> None:
    made = Requests(How(tokenizer="bytes"), "r").make(Shot(3, 0, 25, 0, "score"))
    assert isinstance(made, wire.Score)
    assert (len(made.text), len(made.text_pair)) == (12, 13)
    made = Requests(How(), "r").make(Shot(3, 0, 25, 0, "score", tenant="t", priority=99))
    assert isinstance(made, wire.Score)
    assert (len(made.text.split()), len(made.text_pair.split()), made.tenant, made.priority) == (12, 13, "t", 10)
    with pytest.raises(ConfigError, match="requests of kind 'sing' cannot be made up"):
        Requests(How(), "r").make(Shot(0, 0, 1, 0, "sing"))


def test_texts_have_exactly_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordPiece(
        {"[UNK]": 0, "[CLS]": 1, "the": 2, "of": 3, "and": 4, "to": 5}, unk_token="[UNK]"
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    text = prompts.texts(str(tmp_path / "tokenizer.json"))
    assert [len(made.encode(text(index, tokens)).ids) for index, tokens in enumerate((2, 3, 10, 257))] == [
        2,
        3,
        10,
        257,
    ]
    assert len(prompts.texts("bytes")(0, 33)) == 33
    with pytest.raises(ConfigError, match=r"no such file; give the model's tokenizer\.json"):
        prompts.texts("nowhere.json")
