"""transformers' classes for config.json without the rest of transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.models.config_classes import _Later

IN_A_PROCESS = """
import json, sys
from engine.models.config_classes import find_config_class
from engine.models.families import FAMILIES

types = {family.model_type for family in FAMILIES.values()}
found = {
    "right": all(find_config_class(name).model_type == name for name in types),
    "loaded": sorted({"accelerate", "torch.distributed.tensor", "transformers.activations"} & set(sys.modules)),
}
config_class = find_config_class("llama")
try:
    config_class(initializer_range=2.0)
except Exception as error:
    found["refused"] = str(error)

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import type_validators

found["same"] = LlamaConfig is config_class
sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(config_class(**sizes))
activations = sys.modules["transformers.activations"].ACT2FN
found["activations"] = "silu" in type_validators.ACT2FN and list(type_validators.ACT2FN) == list(activations)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_classes_are_transformers_own_and_bring_no_models() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "greater or equal to 0.0 and smaller or equal to 1.0" in found.pop("refused")
    assert found == {"right": True, "loaded": [], "same": True, "activations": True}


def test_another_name_of_the_module_imports_it() -> None:
    later = _Later("json")
    assert later.loads is json.loads
    assert not hasattr(later, "__path__")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = later.no_such_name
