"""The models: whether they are present, complete, fit each other, and fit this machine's memory.

Files are read, weights are not. A model's files are checked as a verifier and the broker check them. Heads are small,
and only their tensors show their target. So they are loaded as a verifier loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

from specq.checkpoints import draft_form, is_gguf, read_config, read_gguf, weight_bytes
from specq.config import cache_dir
from specq.doctor.checks import NOTE, OK, WRONG, Check, megabytes
from specq.doctor.installation import writable
from specq.drafting.head_kinds import kind_of
from specq.engines import ends_told, local_checkpoint, read_info
from specq.engines.models import default_arithmetic
from specq.engines.native import AUTO, INTEGER, has_block_cache
from specq.models import HEADS, resolve_model
from specq.models.draft_choice import SMALLER
from specq.protocol import ConfigError, ModelInfo, fits, mismatch

HEADS_CHECK = "heads"  # the name of the check of heads
FLOAT_BYTES, HALF_BYTES = 4, 2
ITEM_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = 1 << 30  # most KV that an engine on a CPU takes by default
KV_SLOTS = 64 * 1024  # tokens, by the same rule
ROOM = 1.2  # times the needed memory; less is tight


@dataclass(frozen=True, slots=True)
class PairModel:
    """A model on this machine.

    name         the name that the user gave.
    num_bytes    of its weights in the files.
    num_params   numbers in them; 0 if the files do not have it.
    slot_bytes   of a token's KV in float32.
    num_places   tokens that a pass of a draft model predicts; more than one for a parallel draft model.
    arithmetic   on a CPU by default; "": that of torch.
    """

    name: str
    path: Path
    info: ModelInfo
    kind: str
    num_bytes: int
    num_params: int
    slot_bytes: int
    num_places: int = 1
    arithmetic: str = ""

    @property
    def kv_bytes(self) -> int:
        """The KV memory that an engine on a CPU takes by default."""
        return min(KV_SLOTS * self.slot_bytes, max(KV_BYTES, 1024 * self.slot_bytes))

    @property
    def peak_bytes(self) -> int:
        """The memory for loading it on a CPU.

        It has all numbers as float32, and the files' own if they are kept. In integer arithmetic it has only a file's
        own blocks, in the cache file that is mapped.
        """
        if self.arithmetic == INTEGER:
            return self.num_bytes + self.kv_bytes
        return FLOAT_BYTES * self.num_params + self.num_bytes + self.kv_bytes

    @property
    def device_bytes(self) -> int:
        """The memory of its weights on a GPU, in the files' format or in bfloat16."""
        return max(self.num_bytes, HALF_BYTES * self.num_params)


def find(name: str, role: str) -> PairModel:
    """Return a model on this machine.

    Raises ConfigError with the reason if it is missing or unusable.
    """
    resolved = resolve_model(name, role)
    path = local_checkpoint(resolved) or _cached(resolved)
    if is_gguf(path):
        tensors = read_gguf(path).tensors.values()
        num_params = sum(prod(tensor.shape) for tensor in tensors)
    else:
        num_params = 0
    said, num_bytes = read_config(path), weight_bytes(path)
    if not num_bytes:
        raise ConfigError(f"{path} has no weights: neither *.safetensors nor pytorch_model*.bin")
    item_bytes = ITEM_BYTES.get(str(said.get("dtype") or said.get("torch_dtype") or ""), 1)
    info = read_info(path, name)
    params = num_params or num_bytes // item_bytes
    places = draft_form.num_places(path) if role == "draft" else 1
    arithmetic = default_arithmetic(path)
    return PairModel(name, path, info, _kind(said), num_bytes, params, slot_bytes(said), places, arithmetic)


def _cached(name: str) -> Path:
    """Return the path of a model in the hub's cache, without a download."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # noqa: BLE001 - the hub client raises many kinds
        if "/" not in name:
            raise ConfigError(
                f"{name!r} is neither a name from `specq models` nor a path; a hub name has a slash, as in "
                f"Qwen/Qwen3-0.6B"
            ) from None
        raise ConfigError(f"{name} is not on this machine; fetch it: specq models pull {name}") from None


def _kind(said: dict[str, Any]) -> str:
    layers, hidden = said.get("num_hidden_layers", "?"), said.get("hidden_size", "?")
    return f"{said.get('model_type', 'unknown kind')}, {layers} layers of {hidden}"


def slot_bytes(said: dict[str, Any]) -> int:
    """Return the bytes of a token's keys and values in float32, from a config.json.

    Returns 0 if it does not have the needed fields.
    """
    heads = int(said.get("num_attention_heads") or 0)
    kv_heads = int(said.get("num_key_value_heads") or heads)
    head_dim = int(said.get("head_dim") or (int(said.get("hidden_size") or 0) // heads if heads else 0))
    return 2 * FLOAT_BYTES * int(said.get("num_hidden_layers") or 0) * kv_heads * head_dim


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and its draft model: None for a model that is missing or unusable."""

    target: PairModel | None
    draft: PairModel | None
    checks: tuple[Check, ...]


def look(
    target: str, draft: str, free_bytes: int | None, gpu_bytes: int = 0, heads: str = "", arithmetic: str = AUTO
) -> ModelPair:
    """Check a target, a draft model and heads; "" means none.

    free_bytes  free memory; None if unknown.
    gpu_bytes   free memory of the GPU that computes; 0 if the CPU computes.
    arithmetic  of the target, as asked for.
    """
    checks: list[Check] = []
    found = _looked_up(lambda: find(target, "target"), "target", checks)
    if found and arithmetic != AUTO:
        found = replace(found, arithmetic=arithmetic)
    drafter = _looked_up(lambda: find(draft, "draft"), "draft model", checks) if draft else None
    if not draft:
        advice = "a smaller model with the same tokenizer could draft: --draft-model, or specq train draft"
        checks.append(Check("draft model", NOTE, f"none for {target}", advice))
    if found:
        checks.append(ends(found))
        if found.arithmetic == INTEGER and not gpu_bytes:
            checks += integers(found)
    if found and drafter:
        checks += fitting(found, drafter)
    if found and heads:
        checks.append(heads_fit(heads, found))
    if found:
        models = [found, *([drafter] if drafter else [])]
        checks.append(room_on_gpu(models, gpu_bytes) if gpu_bytes else room(models, free_bytes))
    return ModelPair(found, drafter, tuple(checks))


def _looked_up(find_it: Callable[[], PairModel], name: str, checks: list[Check]) -> PairModel | None:
    try:
        model = find_it()
    except ConfigError as error:
        checks.append(Check(name, WRONG, str(error), "specq models lists the models on this machine"))
        return None
    about = f"{model.kind}, {model.info.num_tokens} tokens, contexts of {model.info.max_length}"
    about += f", parallel: {model.num_places} tokens a pass" if model.num_places > 1 else ""
    checks.append(Check(name, OK, f"{model.name}: {about}, {megabytes(model.num_bytes)} at {model.path}"))
    return model


def ends(target: PairModel) -> Check:
    """Report the tokens that end a text of the target, and where each is named."""
    if told := ends_told(target.path):
        return Check("ends", OK, ", ".join(told))
    advice = "set eos_token_id in generation_config.json, or give jobs max_tokens, stop or stop_token_ids"
    return Check("ends", NOTE, "no file names an end-of-text token", advice)


def integers(target: PairModel) -> Iterator[Check]:
    """Report the arithmetic of a quantised file on a CPU, and check the room for its cache file."""
    advice = "for the text of 0.2: --arithmetic exact for files of Q4_1 and Q8_0, else rounded"
    yield Check("arithmetic", NOTE, "products are those of integers, the default after 0.2", advice)
    if has_block_cache(target.path):
        return
    free_bytes, place = disk_usage(cache_dir()).free, writable("cache", cache_dir() / "blocks")
    if place.status == WRONG:
        yield place
    elif free_bytes < target.num_bytes:
        found = f"the repacked model takes {megabytes(target.num_bytes)} in {cache_dir()}"
        yield Check("cache", WRONG, f"{found}; {megabytes(free_bytes)} are free", "name another folder: SPECQ_CACHE")


def fitting(target: PairModel, draft: PairModel) -> Iterator[Check]:
    """Yield whether drafts can be hints for the target, and whether the draft model is small enough."""
    if not fits(draft.info, target.info):
        advice = "choose a draft model of the same family, or train one: specq train draft"
        yield Check("tokenizer", WRONG, mismatch(draft.info, [target.info]), advice)
    else:
        yield Check("tokenizer", OK, "both have the same")
    if draft.info.max_length < target.info.max_length:
        found = (
            f"the draft model accepts contexts of {draft.info.max_length} tokens, the target {target.info.max_length}"
        )
        yield Check("contexts", NOTE, found, "longer texts continue without its drafts")
    if draft.num_bytes > SMALLER * target.num_bytes:
        found = f"the draft model has {megabytes(draft.num_bytes)}, the target {megabytes(target.num_bytes)}"
        yield Check("sizes", NOTE, found, "a draft should cost a small part of a step; choose a smaller draft model")


def heads_fit(heads: str, target: PairModel) -> Check:
    """Check that heads are complete and fit the target.

    The check covers hidden size, vocabulary, tokenizer, number formats and layers.
    """
    try:
        directory = resolve_model(heads, HEADS)
        kind = kind_of(Path(directory))
        found = kind.describe(Path(directory), target.path, target.info)
    except ConfigError as error:
        return Check(HEADS_CHECK, WRONG, str(error), "choose heads for this target, or train some (docs/heads.md)")
    size = "" if kind.is_target else f", {megabytes(weight_bytes(Path(directory)))}"
    return Check(HEADS_CHECK, OK, f"{found}{size} at {directory}")


def room(models: Sequence[PairModel], free_bytes: int | None) -> Check:
    """Check that weights and KV fit into free memory during loading on a CPU."""
    needed = sum(model.peak_bytes for model in models)
    found = f"weights and KV take up to {megabytes(needed)} while they are loaded on a CPU"
    if free_bytes is None:
        return Check("room", NOTE, found)
    return _room(needed, free_bytes, found, "choose a smaller model, a GGUF file of Q4_1 or Q8_0, or --kv-slots")


def room_on_gpu(models: Sequence[PairModel], free_bytes: int) -> Check:
    """Check that the weights fit into the memory of a GPU; KV takes the rest."""
    needed = sum(model.device_bytes for model in models)
    found = f"weights take {megabytes(needed)} on a GPU, and the KV cache the rest"
    return _room(needed, free_bytes, found, "choose a smaller model, or several GPUs with configs/vllm.toml")


def _room(needed: int, free_bytes: int, found: str, advice: str) -> Check:
    found += f"; {megabytes(free_bytes)} are free"
    if needed > free_bytes:
        return Check("room", WRONG, found, advice)
    if ROOM * needed > free_bytes:
        return Check("room", NOTE, found, "that is tight: stop other processes that use memory")
    return Check("room", OK, found)
