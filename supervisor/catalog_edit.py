"""Changes to the one model directory that omlxd writes to: a link is added, a link or a model is removed.

Nothing outside that directory is ever touched, and a removal cut short leaves no half model behind under its name.
"""

import os
import secrets
import shutil
from pathlib import Path

from supervisor.catalog import ADAPTER_CONFIG


class EditRefused(Exception):
    """A model is not registered or not removed; the message says why."""


def add_link(models_dir: Path, target: Path, name: str) -> Path:
    """Registers the model directory `target` as `name` or `org/name`; the path of the link.

    Raises:
        EditRefused: the name is taken or unusable, or `target` is no model directory.
    """
    parts = name.split("/")
    if len(parts) > 2 or any(not p or p.startswith(".") or "\0" in p for p in parts):
        raise EditRefused(f"{name!r} cannot be a model's name: NAME or ORG/NAME is expected, without a leading dot")
    if not any((target / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise EditRefused(_not_a_model(target))
    link = models_dir / name
    if link.parent != models_dir and link.parent.is_symlink():
        raise EditRefused(f"{link.parent} is a model itself; choose another name with --name")
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        link.symlink_to(target, target_is_directory=True)
    except FileExistsError:
        raise EditRefused(
            f"there is already a model {name}; choose another name with --name, or: omlxctl models rm {name}"
        ) from None
    return link


def _not_a_model(target: Path) -> str:
    if (target / "snapshots").is_dir():
        return f"{target} is a hub download; give the directory that holds it: omlxctl serve --model-dir {target.parent}"
    if any(target.glob("*/config.json")):
        return f"{target} holds models but is none itself; to serve them all: omlxctl serve --model-dir {target}"
    if any(target.glob("*.gguf")):
        return f"{target} holds GGUF files; convert one with: omlxctl models import FILE.gguf"
    return f"{target} is no MLX model: it has no config.json"


def remove(models_dir: Path, path: Path) -> None:
    """Removes the model at `path`: the link when it is one, else the directory with its files.

    Raises:
        EditRefused: it lies outside `models_dir`, or is not there.
    """
    inside = path.absolute().parent.resolve() / path.name  # the last part is not followed: it may be a link
    root = models_dir.resolve()
    if root not in inside.parents:
        raise EditRefused(f"{path} is outside {models_dir}, where omlxd changes nothing; remove it yourself")
    top = root / inside.relative_to(root).parts[0]
    if top.name.startswith("models--"):  # a hub download: its snapshot is made of links into the same directory
        inside = top
    if inside.is_symlink():
        inside.unlink()
    elif inside.is_dir():
        _delete(inside, root)
    else:
        raise EditRefused(f"there is no model directory {path}")
    if inside.parent != root and not any(inside.parent.iterdir()):
        inside.parent.rmdir()


def _delete(directory: Path, root: Path) -> None:
    """Hidden under another name first: whoever looks meanwhile, and after a crash, sees no model there."""
    hidden = root / f".removed-{secrets.token_hex(6)}"
    directory.rename(hidden)
    for place, _, _ in os.walk(hidden):
        Path(place).chmod(0o700)  # a read-only directory is no reason to leave gigabytes behind
    shutil.rmtree(hidden)
