"""Throw-away certificates and kubeconfigs for a local cluster, made with the openssl command."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

DAYS = "2"
_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*args: str) -> None:
    done = subprocess.run(["openssl", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {args[0]} failed: {done.stderr.strip()}")


def make_ca(folder: Path, name: str) -> None:
    """NAME.crt and NAME.key."""
    _openssl(
        "req", "-x509", *_EC_KEY, "-days", DAYS, "-subj", f"/CN={name}",
        "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"),
    )  # fmt: skip


def make_leaf(folder: Path, name: str, ca: str, subject: str, names: str = "") -> None:
    """NAME.crt and NAME.key, signed by `ca`, good for server and client. `names` as in openssl: DNS:a,IP:1.2.3.4."""
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    _openssl("req", "-new", *_EC_KEY, "-subj", subject, "-keyout", str(folder / f"{name}.key"), "-out", str(request))
    lines = ["extendedKeyUsage=serverAuth,clientAuth", *([f"subjectAltName={names}"] if names else [])]
    extensions.write_text("\n".join(lines) + "\n")
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(folder / f"{ca}.crt"), "-CAkey", str(folder / f"{ca}.key"),
        "-CAcreateserial", "-days", DAYS, "-extfile", str(extensions), "-out", str(folder / f"{name}.crt"),
    )  # fmt: skip


def make_service_account_keys(folder: Path) -> None:
    """sa.key and sa.pub, which sign and verify service accounts' tokens."""
    _openssl("genrsa", "-out", str(folder / "sa.key"), "2048")
    _openssl("rsa", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub"))


def write_kubeconfig(path: Path, server: str, folder: Path, name: str) -> None:
    """A kubeconfig that is complete in itself; `name` is a leaf in `folder`, beside ca.crt."""

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": data(f"{name}.crt"),
                    "client-key-data": data(f"{name}.key"),
                },
            }
        ],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": name}}],
        "current-context": "local",
    }
    path.write_text(json.dumps(document, indent=1))
    path.chmod(0o600)
