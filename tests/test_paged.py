"""The kernel that reads pages in place computes what plain matrix products compute, of its own slots and no others."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.generate import compiled, kernels, paged  # noqa: E402
from headway.workers.generate.compiled import CannotCompileError, library  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.padded import PaddedEngine  # noqa: E402
from headway.workers.generate.plan import Plan, Span  # noqa: E402
from headway.workers.generate.probe import CannotError  # noqa: E402
from headway.workers.load import LoadError, load_model  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernel: {kernels.missing()}")

PAGE, PAGES = 8, 120
SHAPES = {  # heads, groups, width, value width, window
    "grouped": (9, 3, 64, 64, 0),
    "a head each": (4, 4, 128, 128, 0),
    "one group": (8, 1, 32, 32, 0),
    "a window": (4, 2, 64, 64, 20),
    "a window of one": (4, 2, 64, 64, 1),
    "odd widths": (6, 2, 24, 20, 0),
    "narrow": (4, 2, 8, 8, 3),
    "latent attention": (2, 2, 192, 128, 0),
    "many heads of a group": (32, 1, 16, 16, 0),
}


class Case:
    """A step of rows and chunks over pages that hold numbers, and NaN wherever nobody has written."""

    def __init__(self, shape: tuple[int, int, int, int, int], seed: int) -> None:
        self.heads, groups, width, value_width, self.window = shape
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        free = rng.sample(range(PAGES), PAGES)
        decode = [self._span(rng.randint(0, 150), 1, free) for _ in range(rng.randint(1, 4))]
        prefill = [self._span(rng.choice([0, 5, 70]), rng.choice([2, 40, 67]), free) for _ in range(rng.randint(0, 2))]
        self.plan = Plan(decode, prefill, PAGE, torch.device("cpu"), in_place=True)
        self.query = torch.randn(1, self.plan.tokens, self.heads, width, generator=generator).transpose(1, 2)
        self.given = torch.randn(1, groups, self.plan.tokens, width, generator=generator)
        self.value = torch.randn(1, groups, self.plan.tokens, value_width, generator=generator)
        self.keys = torch.full((PAGE * PAGES, groups, width), float("nan"))
        self.values = torch.full((PAGE * PAGES, groups, value_width), float("nan"))
        self.slots = self.plan.read.split([end for _, end in self.plan.lengths])
        for slots in self.slots:
            self.keys[slots] = torch.randn(len(slots), groups, width, generator=generator)
            self.values[slots] = torch.randn(len(slots), groups, value_width, generator=generator)

    def _span(self, start: int, count: int, free: list[int]) -> Span:
        pages = [free.pop() for _ in range(-(-(start + count) // PAGE))]
        return Span([7] * count, start, pages, last=True)

    def attend(self) -> Any:
        self.plan.reached = (self.given, self.keys, self.values)
        return paged.attend(self.plan, self.query, self.given, self.value, None, self.window, None, None)[0]

    def expected(self) -> Any:
        """[tokens, heads, value width] by plain products in double precision."""
        share, at, parts = self.heads // self.keys.shape[1], 0, []
        for slots, (count, end) in zip(self.slots, self.plan.lengths, strict=True):
            key, value = (
                store[slots].double().transpose(0, 1).repeat_interleave(share, 0) for store in (self.keys, self.values)
            )
            scores = self.query[0, :, at : at + count].double() @ key.transpose(1, 2) * key.shape[-1] ** -0.5
            column, query = torch.arange(end), torch.arange(end - count, end)[:, None]
            hidden = (column > query) | ((column <= query - self.window) if self.window else column < 0)
            parts.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1))
            at += count
        return torch.cat(parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_attention_over_its_own_slots(shape: str) -> None:
    for seed in range(12):
        case = Case(SHAPES[shape], seed)
        assert float((case.attend() - case.expected()).abs().max()) < 2e-5, seed


def test_neither_neighbours_nor_the_number_of_threads_change_a_bit() -> None:
    case, threads = Case(SHAPES["grouped"], 3), torch.get_num_threads()
    before = case.attend()
    for slots in case.slots[1:]:
        case.keys[slots] = -case.keys[slots]
        case.values[slots] = float("nan")
    try:
        torch.set_num_threads(3)
        after = case.attend()
    finally:
        torch.set_num_threads(threads)
    own = case.plan.lengths[0][0]
    assert torch.equal(after[:own], before[:own])
    assert not torch.isfinite(after[own:]).any()


def test_what_the_kernel_is_not_made_for_is_refused() -> None:
    case = Case(SHAPES["grouped"], 1)
    case.plan.reached = (case.given, case.keys, case.values)

    def attend(query: Any = case.query, key: Any = case.given, sinks: Any = None, softcap: Any = None) -> Any:
        return paged.attend(case.plan, query, key, case.value, None, 0, sinks, softcap)

    for wrong, why in (
        ({"key": case.given.clone()}, "other keys"),
        ({"sinks": torch.zeros(9)}, "sinks"),
        ({"softcap": 5.0}, "soft-capped"),
        ({"query": case.query.double()}, "float32"),
        ({"query": case.query[:, :4]}, "4 heads of 64 on 3 groups"),
    ):
        with pytest.raises(CannotError, match=why):
            attend(**wrong)
    attend()


# ---------------------------------------------------------------- where it is taken


@pytest.mark.parametrize(("name", "active"), [("llama", "paged"), ("qwen3", "paged"), ("gpt2", "paged")])
def test_it_is_taken_where_it_can_be_and_shown(name: str, active: str) -> None:
    wanted = tiny.requests(5)
    subject = tiny.engine(name)
    assert subject.card.facts["attention"] == f"packed {active}"
    tiny.expect_solo(tiny.drive(subject, wanted), wanted, name)


def test_a_cache_in_fewer_bits_is_read_by_sdpa() -> None:
    assert tiny.engine(kv_dtype="bfloat16").card.facts["attention"] == "packed sdpa"
    with pytest.raises(LoadError, match=r"attention: paged cannot be had: .*kv_dtype.*set attention: auto"):
        tiny.engine(kv_dtype="bfloat16", attention="paged")


def test_it_is_for_packed_generation_alone() -> None:
    with pytest.raises(LoadError, match=r"attention: paged needs pages.*set attention: auto"):
        PaddedEngine(ModelSpec(attention="paged", kv_mib=4), tiny.loaded(tiny.model("llama")), "asked for")
    with pytest.raises(LoadError, match=r"attention: paged is for generation; set attention: auto for engine: embed"):
        load_model(ModelSpec(engine="embed", model="minilm", attention="paged"))


def test_without_a_compiler_sdpa_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    library.cache_clear()
    kernels.kernel.cache_clear()
    try:
        subject = GenerateEngine(ModelSpec(kv_mib=4), tiny.loaded(tiny.model("llama")))
        assert subject.card.facts["attention"] == "packed sdpa"
        assert "there is no C compiler (no-such-compiler); install gcc 12 or clang, or set CC" in caplog.text
    finally:
        library.cache_clear()
        kernels.kernel.cache_clear()


def test_a_source_that_does_not_compile_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "wrong.c"
    source.write_text("int headway(void) { return nothing; }\n")
    with pytest.raises(CannotCompileError, match=r"does not compile wrong.c: .*nothing.* undeclared"):
        library(source)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_a_library_is_compiled_once_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "right.c"
    source.write_text("int headway(void) { return 5; }\n")
    assert library(source).headway() == 5
    library.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library(source).headway() == 5
    monkeypatch.setattr(compiled, "_cpu", lambda: "another")
    library.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        library(source)
    library.cache_clear()
