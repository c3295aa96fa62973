"""Images for the local cluster: Baton's own, built once for each state of the sources, and tiny ones made by hand."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from engine.kernels.build import EXCHANGE, FEATURES, VARIANTS, library_file

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "images"
TAG = "dev"
PAUSE = "registry.local/pause:1"
COREDNS = "registry.local/coredns:1"
LMCACHE = f"baton-lmcache:{TAG}"
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_SETUPTOOLS = _PROJECT["tool"]["setuptools"]
_PACKAGES = tuple(pattern.removesuffix("*") for pattern in _SETUPTOOLS["packages"]["find"]["include"])
_INSTALLED = ("*.py", *_SETUPTOOLS["package-data"]["*"])  # of what is in their folders
_CONVERTERS = ("engine/loading/embedded_model.py", "engine/loading/gguf_llama.py")  # what made the model inside
_BASE = "docker.io/library/python:{}-slim-bookworm"


def why_not() -> str:
    """Why no image can be built here; empty if one can."""
    return "" if shutil.which("buildah") else "buildah is not installed"


def archive(name: str) -> Path:
    """An image archive of `router` or `cpu`, tagged `baton-NAME:dev`; made if the sources have changed.

    If only Baton's own code has changed, that is replaced in the image that images/build made before.
    KUBE_IMAGES names a folder with baton-NAME.tar if they are there already.
    """
    if folder := os.environ.get("KUBE_IMAGES"):
        return Path(folder) / f"baton-{name}.tar"
    built = _hash_of(_what_an_image_is_built_of(name))
    path = FOLDER / f"baton-{name}-{built}-{_hash_of(_code())}.tar"
    if path.exists():
        return path
    environ = _environ()
    image, kept = f"baton-{name}:{TAG}", f"baton-{name}-built:{built}"
    if _run_quietly(["buildah", "inspect", "--type", "image", kept], environ):
        _replace_code(kept, image, environ)
    else:
        pull = "--pull-never" if _make_base() else ""
        build = {"BUILDER": "buildah", "TAG": TAG, "PYTHON": sys.executable, "BUILD_OPTIONS": pull}
        _run([str(ROOT / "images" / "build"), name], {**environ, **build})
        _run(["buildah", "tag", image, kept], environ)
    _push(image, path, environ)
    return path


def why_no_lmcache() -> str:
    """Why there is no image of LMCache; empty if there is one. It is not built here: its contents are large, and
    none of them is Baton's."""
    if os.environ.get("KUBE_IMAGES"):
        return "" if lmcache().exists() else "KUBE_IMAGES has no baton-lmcache.tar"
    if _run_quietly(["buildah", "inspect", "--type", "image", LMCACHE], _environ()):
        return ""
    return f"there is no image {LMCACHE}: images/build lmcache makes it"


def lmcache() -> Path:
    """The archive of an image that images/build has made."""
    if folder := os.environ.get("KUBE_IMAGES"):
        return Path(folder) / "baton-lmcache.tar"
    environ = _environ()
    made = _run(["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", LMCACHE], environ).strip()
    path = FOLDER / f"baton-lmcache-{made[:12]}.tar"
    if not path.exists():
        _push(LMCACHE, path, environ)
    return path


def _push(image: str, path: Path, environ: dict[str, str]) -> None:
    """Replaces earlier archives of the image."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    _run(["buildah", "push", "-q", image, f"docker-archive:{partial}:{image}"], environ)
    for old in FOLDER.glob(f"{image.partition(':')[0]}-*.tar"):
        old.unlink()
    partial.rename(path)


def _environ() -> dict[str, str]:
    return {
        **os.environ,
        "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "overlay"),
        "BUILDAH_ISOLATION": "chroot",  # needs no more than root in a container has
    }


def _replace_code(kept: str, image: str, environ: dict[str, str]) -> None:
    """`image` is `kept` with the present code: a layer of a few MB, made in seconds."""
    container = _run(["buildah", "from", "--pull-never", kept], environ).strip()
    try:
        [packages] = Path(_run(["buildah", "mount", container], environ).strip()).glob(
            "opt/baton/lib/python3*/site-packages"
        )
        for package in _PACKAGES:
            shutil.rmtree(packages / package, ignore_errors=True)
        for file in _code():
            target = packages / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            target.chmod(0o644)
        inside = [f"/opt/baton/lib/{packages.parent.name}/site-packages/{package}" for package in _PACKAGES]
        compile_all = ["/opt/baton/bin/python", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
        _run(["buildah", "run", "--user", "0", container, "--", *compile_all, *inside], environ)
        _run(["buildah", "commit", "-q", container, image], environ)
    finally:
        _run(["buildah", "rm", container], environ)


def _code() -> list[Path]:
    """The compiled kernels too, which belong to the sources beside them: an image with other ones would have none."""
    files = (file for package in _PACKAGES for file in (ROOT / package).rglob("*"))
    code = [file for file in files if any(fnmatch(file.name, pattern) for pattern in _INSTALLED)]
    return sorted([*code, *filter(Path.exists, map(library_file, (FEATURES, EXCHANGE, *VARIANTS)))])


def _what_an_image_is_built_of(name: str) -> list[Path | str]:
    """All but the code: dependencies, entry points, the way it is built, and the model inside."""
    project = _PROJECT["project"]
    asked_for = [json.dumps(project[key], sort_keys=True) for key in ("dependencies", "scripts")]
    extras = json.dumps({key: value for key, value in project["optional-dependencies"].items() if key != "dev"})
    files = ["constraints.txt", "images/build", f"images/Dockerfile.{name}", *(_CONVERTERS if name == "cpu" else ())]
    return [*asked_for, extras, *(ROOT / file for file in files)]


def _hash_of(parts: Sequence[Path | str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else f"{part.relative_to(ROOT)}\0".encode() + part.read_bytes()
        digest.update(content)
    return digest.hexdigest()[:12]


def _make_base() -> bool:
    """If Debian's debootstrap is installed, a stand-in for the base image, so that no registry is needed."""
    environ = _environ()
    base = _BASE.format(f"{sys.version_info.major}.{sys.version_info.minor}")
    if _run_quietly(["buildah", "inspect", base], environ):
        return True
    if shutil.which("debootstrap") is None or sys.version_info[:2] != (3, 11):  # bookworm's Python
        return False
    root = FOLDER / "base"
    if not (root / "usr/bin/pip3").exists():
        shutil.rmtree(root, ignore_errors=True)
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        _run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)], environ)
        (root / "usr/local/bin/python3").symlink_to("/usr/bin/python3")
        for unused in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / unused)
    container = subprocess.run(
        ["buildah", "from", "scratch"], check=True, capture_output=True, text=True, env=environ
    ).stdout.strip()
    _run(["buildah", "add", "-q", container, str(root), "/"], environ)
    _run(["buildah", "commit", "-q", container, base], environ)
    _run(["buildah", "rm", container], environ)
    return True


def _run(command: list[str], environ: dict[str, str]) -> str:
    """Standard output. Raises RuntimeError if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def _run_quietly(command: list[str], environ: dict[str, str]) -> bool:
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0


# --------------------------------------------------------------------------------------------- made by hand


def tiny_image(path: Path, tag: str, program: bytes, entrypoint: list[str]) -> Path:
    """An archive of an image with one static program, at `entrypoint[0]`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, entrypoint[0].lstrip("/"), program, 0o755)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(path, mode="w") as tar:
        _add(tar, "layer.tar", layer.getvalue(), 0o644)
        _add(tar, "config.json", json.dumps(config).encode(), 0o644)
        _add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)
    return path


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def pause_program() -> bytes:
    """The smallest program that holds a pod's namespaces: an x86-64 ELF file that calls pause() for ever."""
    #      mov eax, 34 (pause)      syscall    jmp to the start
    code = b"\xb8\x22\x00\x00\x00" + b"\x0f\x05" + b"\xeb\xf7"
    base, headers = 0x400000, 64 + 56
    size = headers + len(code)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return header + segment + code
