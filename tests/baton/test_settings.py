"""Precedence of flags, variables, YAML and defaults; and that each mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.settings import SETTINGS, load, to_flags
from common.config import RouterSettings, Settings, UpSettings, WorkerSettings
from common.errors import ConfigError


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "baton.yaml"
    path.write_text(text)
    return str(path)


def test_flag_wins_over_variable_over_yaml_over_default(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "num_blocks: 1\nchunk_size: 1\nblock_size: 1\n")
    environ = {"BATON_NUM_BLOCKS": "2", "BATON_CHUNK_SIZE": "2"}
    settings = load(UpSettings, {"num_blocks": "3"}, environ=environ, config=config)
    assert (settings.num_blocks, settings.chunk_size, settings.block_size) == (3, 2, 1)
    assert settings.max_num_seqs == UpSettings().max_num_seqs


def test_config_file_from_variable_and_flag_over_it(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "num_blocks: 7\n")
    assert load(UpSettings, {}, environ={"BATON_CONFIG": config}).num_blocks == 7
    other = tmp_path / "other.yaml"
    other.write_text("num_blocks: 8\n")
    assert load(UpSettings, {}, environ={"BATON_CONFIG": config}, config=str(other)).num_blocks == 8


def test_types_of_every_source(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "cpu_cores: [0, 1]\nenable_prefix_caching: false\n")
    settings = load(WorkerSettings, {"verify_checksums": True}, environ={"BATON_CPU_CORES": "2,3"}, config=config)
    assert settings.cpu_cores == (2, 3)
    assert settings.enable_prefix_caching is False
    assert settings.verify_checksums is True
    router = load(RouterSettings, {"prefill": "a:1, b:2"}, environ={})
    assert router.prefill == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("flags", "environ", "yaml", "message"),
    [
        ({"num_blocks": "0"}, {}, "", "--num-blocks: should be greater than 0, not '0'"),
        ({"dtype": "bfloat61"}, {}, "", "did you mean bfloat16?"),
        ({}, {"BATON_HTTP_PORT": "70000"}, "", "BATON_HTTP_PORT: should be less than or equal to 65535, not '70000'"),
        ({}, {"BATON_NUM_BLOKS": "1"}, "", "BATON_NUM_BLOKS: no such setting, did you mean BATON_NUM_BLOCKS?"),
        ({}, {}, "num_bloks: 1", "no such setting, did you mean num_blocks?"),
        ({}, {}, "listen: x", "no such setting of this command (it is one of baton prefill, decode, worker)"),
        ({}, {}, "num_blocks: many", "num_blocks in "),
        ({}, {}, "- a", "must hold one mapping of settings, not a list"),
        ({}, {}, "a: [", "is not YAML"),
        ({"num_blocks": "0", "chunk_size": "x"}, {}, "", "; --chunk-size: "),
    ],
)
def test_what_is_wrong_is_named(
    flags: dict[str, object], environ: dict[str, str], yaml: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(UpSettings, flags, environ=environ, config=yaml_file(tmp_path, yaml))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_config_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^--config: cannot read /no/such\.yaml: No such file"):
        load(UpSettings, {}, environ={}, config="/no/such.yaml")


def test_variables_of_other_commands_and_of_kubernetes_are_no_mistake() -> None:
    environ = {
        "BATON_HTTP_LISTEN": "0.0.0.0:1",  # the router's
        "BATON_ROUTER_SERVICE_HOST": "10.0.0.1",
        "BATON_ROUTER_SERVICE_PORT_GRPC": "50051",
        "BATON_ROUTER_PORT": "tcp://10.0.0.1:50051",
        "BATON_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "BATON_HTTP_PORT": "tcp://10.0.0.1:80",  # of a Service called baton-http: not our --http-port
    }
    assert load(UpSettings, {}, environ=environ) == UpSettings()


@pytest.mark.parametrize("settings_class", list(dict.fromkeys(SETTINGS.values())))
def test_flags_of_defaults_are_none(settings_class: type[Settings]) -> None:
    assert to_flags(settings_class()) == []


def test_flags_give_the_same_settings_back() -> None:
    settings = WorkerSettings(
        num_blocks=9, cpu_cores=(0, 1), enable_prefix_caching=False, listen="h:0", dtype="float32"
    )
    flags = to_flags(settings)
    assert "--no-enable-prefix-caching" in flags
    assert "--cpu-cores=0,1" in flags
    pairs = dict(flag.removeprefix("--").split("=", 1) for flag in flags if "=" in flag)
    values: dict[str, object] = {name.replace("-", "_"): value for name, value in pairs.items()}
    assert load(WorkerSettings, values | {"enable_prefix_caching": False}, environ={}) == settings
