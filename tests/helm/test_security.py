"""TLS and API keys in the chart: who gets which files, and what the processes make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.settings import SETTINGS, load
from common.config import TlsSettings
from common.tls import peer_files
from router.api.api_keys import ApiKeys
from tests.helm.chart import CHART, HELM, Object, arguments, find, helm, pod_spec, render, settings_of

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

TLS: dict[str, object] = {"tls.enabled": True, "tls.existingSecret": "certs"}
NAME = "demo-baton.prod.svc"
COMPONENTS = ("router", "prefill", "decode", "autoscaler")


def mounts(spec: Object) -> dict[str, str]:
    """Where each Secret is mounted."""
    volumes = {one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    found = {}
    for mount in spec["containers"][0]["volumeMounts"]:
        if mount["name"] in volumes:
            assert mount["readOnly"] is True
            found[volumes[mount["name"]]] = mount["mountPath"]
    return found


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_process_gets_the_certificate_and_checks_one_name(component: str) -> None:
    objects = render(TLS)
    settings = settings_of(objects, f"demo-baton-{component}")
    folder = mounts(pod_spec(objects, f"demo-baton-{component}"))["certs"]
    assert {name: settings[name] for name in TlsSettings.model_fields} == {
        "tls_cert": f"{folder}/tls.crt",
        "tls_key": f"{folder}/tls.key",
        "tls_ca": f"{folder}/ca.crt",
        "tls_server_name": NAME,
    }
    assert "tls_client_ca" not in settings


def test_nothing_of_it_without_tls() -> None:
    objects = render()
    for component in COMPONENTS:
        assert not set(TlsSettings.model_fields) & set(settings_of(objects, f"demo-baton-{component}"))
        assert mounts(pod_spec(objects, f"demo-baton-{component}")) == {}
    assert not [one for one in objects if one["kind"] in ("Certificate", "Issuer", "Secret")]


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_probes_go_to_the_port_that_speaks_no_tls(component: str) -> None:
    for values in ({}, TLS):
        objects = render(values)
        (container,) = pod_spec(objects, f"demo-baton-{component}")["containers"]
        settings = settings_of(objects, f"demo-baton-{component}")
        listens = settings["health_listen" if values else "grpc_listen" if component == "router" else "listen"]
        port = int(listens.rpartition(":")[2])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == port, probe
        assert port in {one["containerPort"] for one in container["ports"]}


OWN_CA: dict[str, object] = {
    "tls.clientCertificates": True,
    "tls.clientCa": {"existingSecret": "client-ca", "clientSecret": "client"},
}


def test_clients_certificates_come_from_a_ca_of_their_own() -> None:
    objects = render({**TLS, **OWN_CA})
    settings, spec = settings_of(objects, "demo-baton-router"), pod_spec(objects, "demo-baton-router")
    folders = mounts(spec)
    assert settings["tls_client_ca"] == f"{folders['client-ca']}/ca.crt"
    assert settings["tls_ca"] == f"{folders['certs']}/ca.crt"
    (volume,) = (one["secret"] for one in spec["volumes"] if one["name"] == "client-ca")
    assert [item["key"] for item in volume["items"]] == ["ca.crt"], "not the key that signs"
    for component in COMPONENTS[1:]:
        assert set(mounts(pod_spec(objects, f"demo-baton-{component}"))) == {"certs"}


def test_the_cas_of_cert_manager_are_two() -> None:
    for issuer in ({}, {"kind": "ClusterIssuer", "name": "company"}):
        values = {"enabled": True, "clientCertificates": True, "certManager": {"issuerRef": issuer}}
        objects = render({"tls": values})
        fleet, client = (find(objects, "Certificate", f"demo-baton{suffix}")["spec"] for suffix in ("", "-client"))
        assert fleet["issuerRef"] != client["issuerRef"]
        assert "server auth" not in client["usages"]
        ca = find(objects, "Issuer", client["issuerRef"]["name"])["spec"]["ca"]["secretName"]
        assert ca in mounts(pod_spec(objects, "demo-baton-router"))
        self_signed = find(objects, "Certificate", ca)["spec"]["issuerRef"]["name"]
        assert find(objects, "Issuer", self_signed)["spec"] == {"selfSigned": {}}


@pytest.mark.parametrize(
    ("client_ca", "named"),
    [({}, "tls.clientCa.existingSecret"), ({"existingSecret": "client-ca"}, "tls.clientCa.clientSecret")],
)
def test_the_fleets_ca_is_not_taken_for_clients(client_ca: dict[str, object], named: str) -> None:
    values = {**TLS, "tls.clientCertificates": True, "tls.clientCa": client_ca}
    done = helm("template", "demo", str(CHART), *arguments(values))
    assert done.returncode != 0
    assert named in done.stderr


def test_certificates_of_cert_manager_hold_every_name_that_is_checked() -> None:
    objects = render({"tls": {"enabled": True, "dnsNames": ["llm.example.com"]}, "autoscaling.mode": "keda"})
    leaf = find(objects, "Certificate", "demo-baton")["spec"]
    assert {NAME, "demo-baton-router", "demo-baton-router.prod.svc", "llm.example.com"} <= set(leaf["dnsNames"])
    assert {"server auth", "client auth"} <= set(leaf["usages"])
    assert mounts(pod_spec(objects, "demo-baton-decode")) == {leaf["secretName"]: "/etc/baton-tls"}
    # A chain that ends in the release itself.
    issuer = find(objects, "Issuer", leaf["issuerRef"]["name"])["spec"]
    ca = next(one["spec"] for one in objects if one["kind"] == "Certificate" and one["spec"].get("isCA"))
    assert issuer["ca"]["secretName"] == ca["secretName"]
    assert find(objects, "Issuer", ca["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    # KEDA checks the host that it is told.
    for role in ("prefill", "decode"):
        (trigger,) = find(objects, "ScaledObject", f"demo-baton-{role}")["spec"]["triggers"]
        assert trigger["metadata"]["scalerAddress"].partition(":")[0] in leaf["dnsNames"]
        authentication = find(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])["spec"]
        assert {one["parameter"]: (one["name"], one["key"]) for one in authentication["secretTargetRef"]} == {
            "caCert": (leaf["secretName"], "ca.crt"),
            "tlsClientCert": (leaf["secretName"], "tls.crt"),
            "tlsClientKey": (leaf["secretName"], "tls.key"),
        }


def test_an_issuer_of_the_users_own_makes_no_other() -> None:
    issuer = {"kind": "ClusterIssuer", "name": "company", "group": "cert-manager.io"}
    objects = render({"tls": {"enabled": True, "certManager": {"issuerRef": issuer}}})
    assert find(objects, "Certificate", "demo-baton")["spec"]["issuerRef"] == issuer
    assert len([one for one in objects if one["kind"] in ("Certificate", "Issuer")]) == 1


def test_prometheus_reaches_the_router_over_tls() -> None:
    values: dict[str, object] = {**TLS, "metrics.serviceMonitor.enabled": True, **OWN_CA}
    (endpoint,) = find(render(values), "ServiceMonitor", "demo-baton-router")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", NAME)
    assert endpoint["tlsConfig"]["keySecret"] == {"name": "client", "key": "tls.key"}
    (plain,) = find(render(values), "ServiceMonitor", "demo-baton-autoscaler")["spec"]["endpoints"]
    assert "scheme" not in plain


def test_the_certificates_of_external_metrics_are_others() -> None:
    objects = render({**TLS, "autoscaler.tls": {"mode": "secret", "secretName": "metrics"}})
    settings = settings_of(objects, "demo-baton-autoscaler")
    folders = mounts(pod_spec(objects, "demo-baton-autoscaler"))
    assert settings["external_metrics_cert"] == f"{folders['metrics']}/tls.crt"
    assert settings["tls_cert"] == f"{folders['certs']}/tls.crt"
    assert folders["metrics"] != folders["certs"]


def test_settings_with_tls_are_settings_of_the_processes(tmp_path: Path) -> None:
    """And `peer_files` takes them, but for the files that are not there."""
    for component in COMPONENTS:
        document = find(render(TLS), "ConfigMap", f"demo-baton-{component}")
        path = tmp_path / "settings.yaml"
        path.write_text(document["data"]["settings.yaml"])
        settings = load(SETTINGS[component], {}, environ={}, config=str(path))
        assert isinstance(settings, TlsSettings)
        with pytest.raises(Exception, match=r"^tls_cert: cannot read /etc/baton-tls/tls.crt"):
            peer_files(settings)


# ------------------------------------------------------------------------------------------------------ API keys


def test_keys_become_a_file_that_the_router_reads(tmp_path: Path) -> None:
    keys = [{"key": "sk-a", "name": "alice", "tenant": "research"}, {"key": "sk-b"}, {"key": "sha256:" + "0f" * 32}]
    objects = render({"apiKeys.keys": keys})
    secret = find(objects, "Secret", "demo-baton-api-keys")
    path = tmp_path / "keys"
    path.write_text(secret["stringData"]["keys"])
    known = ApiKeys(str(path))
    assert known.client("Bearer sk-a", "rest").tenant == "research"
    assert known.client("Bearer sk-b", "rest").tenant == ""
    folder = mounts(pod_spec(objects, "demo-baton-router"))["demo-baton-api-keys"]
    assert settings_of(objects, "demo-baton-router")["api_keys_file"] == f"{folder}/keys"


def test_only_the_router_gets_the_keys() -> None:
    objects = render({"apiKeys.existingSecret": "keys"})
    assert not [one for one in objects if one["kind"] == "Secret"]
    for component in COMPONENTS:
        assert ("keys" in mounts(pod_spec(objects, f"demo-baton-{component}"))) == (component == "router")


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"apiKeys.keys": [{"key": "with space"}]}, "apiKeys.keys.0.key"),
        ({"apiKeys.keys": [{"key": "sha256:12"}]}, "apiKeys.keys.0.key"),
        ({"apiKeys.keys": [{"name": "nobody"}]}, "apiKeys.keys.0"),
        ({"apiKeys.keys": [{"key": "sk", "tenant": "a b"}]}, "apiKeys.keys.0.tenant"),
        ({"tls.enable": True}, "tls"),
        ({"tls.certManager.duration": "90d"}, "tls.certManager.duration"),
        ({"tls.dnsNames": ["https://example.com"]}, "tls.dnsNames.0"),
        ({"router.settings.tls_cert": "/x"}, "router.settings"),
        ({"lmcache.redis.url": "redis://:secret@host"}, "lmcache.redis.url"),
        ({"kv.sharedStorage.size": 20}, "kv.sharedStorage.size"),
        ({"both.autoscaling.enabled": "yes"}, "both.autoscaling.enabled"),
    ],
)
def test_a_bad_value_fails_lint_with_its_path(values: dict[str, object], path: str) -> None:
    done = helm("lint", str(CHART), *arguments(values))
    assert done.returncode != 0
    assert f"- {path}: " in done.stdout


def test_two_sources_of_keys_are_one_too_many() -> None:
    done = helm(
        "template", "demo", str(CHART), *arguments({"apiKeys": {"existingSecret": "a", "keys": [{"key": "b"}]}})
    )
    assert done.returncode != 0
    assert "apiKeys.keys" in done.stderr


# ------------------------------------------------------------------------------------------------------ helm test


def test_the_test_pod_is_told_where_everything_is() -> None:
    pod = find(render({**TLS, "apiKeys.existingSecret": "keys"}), "Pod", "demo-baton-test-chat")["spec"]
    (container,) = pod["containers"]
    assert container["args"] == [(CHART / "files" / "chat.py").read_text()]
    environment = {one["name"]: one["value"] for one in container["env"]}
    folders = mounts(pod)
    assert environment["TLS_DIR"] == folders["certs"]
    assert "CLIENT_DIR" not in environment
    assert environment["KEYS_FILE"] == f"{folders['keys']}/keys"
    assert environment["HTTP"].startswith("https://demo-baton-router:")
    asked = find(render({**TLS, **OWN_CA}), "Pod", "demo-baton-test-chat")["spec"]
    environment = {one["name"]: one["value"] for one in asked["containers"][0]["env"]}
    assert environment["CLIENT_DIR"] == mounts(asked)["client"]
    for spec in (pod, asked):  # no certificate of the fleet
        (volume,) = (one["secret"] for one in spec["volumes"] if one["name"] == "tls")
        assert [item["key"] for item in volume["items"]] == ["ca.crt"]
    plain = find(render(), "Pod", "demo-baton-test-chat")["spec"]["containers"][0]
    assert not {"TLS_DIR", "CLIENT_DIR", "KEYS_FILE"} & {one["name"] for one in plain["env"]}
