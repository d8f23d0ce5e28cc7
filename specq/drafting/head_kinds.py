"""The kinds of heads in a directory, distinguished by its config.json.

To add a kind: a line in `KINDS`, before the kinds whose config.json may look the same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from specq.checkpoints import read_json
from specq.drafting.block import form as block_form
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3 import mtp_form
from specq.drafting.head_checks import check_target
from specq.drafting.head_config import HeadShape, check_layers
from specq.drafting.medusa import form as medusa_form
from specq.drafting.stored_heads import check_stored, check_values
from specq.engines import local_checkpoint, read_info
from specq.protocol import BLOCK, EAGLE, MEDUSA, ConfigError, ModelInfo


class HeadKind(NamedTuple):
    """A kind of heads.

    source  the name of the source that drafts with them.
    called  what messages call them, such as "an EAGLE-3 head".
    is_of   whether a directory's config.json is of this kind.
    check   raises ConfigError for a config.json that is not valid.
    arrays  the module that loads them without torch.
    is_target  whether the directory is that of the target, too.
    """

    source: str
    called: str
    is_of: Callable[[Path], bool]
    check: Callable[[Path], object]
    arrays: str
    is_target: bool = False

    def describe(self, heads: Path, target: Path, info: ModelInfo) -> str:
        """Return a short description of heads for a target. Raises ConfigError if they do not fit it."""
        loaded: Any = import_module(self.arrays).load_arrays(str(heads), str(target), info)
        return str(loaded.said)


KINDS = (
    HeadKind(BLOCK, block_form.KIND, block_form.is_block, block_form.block_shape, "specq.drafting.block.arrays"),
    HeadKind(
        *(BLOCK, eagle_form.PARALLEL_KIND, eagle_form.is_parallel, eagle_form.eagle_shape),
        "specq.drafting.eagle3.arrays",
    ),
    HeadKind(EAGLE, eagle_form.KIND, eagle_form.is_eagle, eagle_form.eagle_shape, "specq.drafting.eagle3.arrays"),
    HeadKind(
        *(EAGLE, eagle_form.MTP_KIND, mtp_form.is_mtp, mtp_form.mtp_layer, "specq.drafting.eagle3.arrays"),
        is_target=True,
    ),
    HeadKind(MEDUSA, medusa_form.KIND, lambda _: True, medusa_form.heads_shape, "specq.drafting.medusa.arrays"),
)


def own_heads(target: str) -> str:
    """Return a target, which drafts for itself, if it is a directory with an MTP layer that we compute; else ""."""
    path = Path(target).expanduser()
    return target if target and path.is_dir() and mtp_form.is_usable(path) else ""


def kind_of(heads: Path) -> HeadKind:
    """Return the kind of heads in a directory: Medusa heads, if its config.json is of no other kind."""
    return next(kind for kind in KINDS if kind.is_of(heads))


def check_for_engine(heads: str, model: str, name: str, *, reads_values: bool = False) -> None:
    """Raise ConfigError for heads that the vllm engine does not run, or that do not fit a local target.

    Only headers, tables of tokens and the config.json of both are read. `reads_values`: all values of the heads, too.
    `model`: the target's checkpoint or hub name, `name`: what messages call it.
    """
    directory, here = Path(heads), local_checkpoint(model)
    if not directory.is_dir():
        return
    kind = kind_of(directory)
    if kind.called not in (eagle_form.KIND, block_form.KIND):
        instead = "use --heads mtp" if kind.is_target else "leave --heads out, or use the torch engine"
        raise ConfigError(
            f"the vllm engine does not run {kind.called} ({heads}), but EAGLE-3 heads and block drafters: {instead}"
        )
    shape = kind.check(directory)
    if isinstance(shape, block_form.BlockShape) and (shape.norms_states or shape.mask_token_id is None):
        raise ConfigError(
            f"{heads} is {kind.called} in specq's own form, which vLLM does not read: use the torch engine"
        )
    assert isinstance(shape, (block_form.BlockShape, eagle_form.EagleShape))
    if here is not None and here.is_dir():
        _check_fit(directory, shape, here, name, kind.called)
    check_stored(directory, shape, kind.called)
    if reads_values:
        check_values(directory, kind.called)


def _check_fit(heads: Path, shape: HeadShape, target: Path, name: str, called: str) -> None:
    """Raise ConfigError if heads do not fit a target, unless its config.json has the sizes elsewhere."""
    said = read_json(target, "config.json")
    if type(said.get("hidden_size")) is int and type(said.get("num_hidden_layers")) is int:
        check_target(heads, shape, said["hidden_size"], read_info(target, name))
        check_layers(shape.layers, said["num_hidden_layers"], called)
