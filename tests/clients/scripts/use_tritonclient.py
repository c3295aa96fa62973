"""Triton's client, unchanged, as for its backend of vLLM: gRPC with typed numpy tensors, a stream, and REST with binary and
JSON tensors."""

import json
import queue
import sys

import numpy
import openai
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

URL, MODEL, ADDRESS = sys.argv[1:4]
PROMPT = "The capital of Japan is"
SAMPLING = {"temperature": "0", "max_tokens": 12}
NAMES = ("text_output", "finish_reason", "num_output_tokens")


def inputs(module, **flags):
    texts = {"text_input": PROMPT, "sampling_parameters": json.dumps(SAMPLING)}
    made = []
    for name, value in {**texts, "exclude_input_in_output": True, **flags}.items():
        is_flag = isinstance(value, bool)
        one = module.InferInput(name, [1], "BOOL" if is_flag else "BYTES")
        one.set_data_from_numpy(numpy.array([value], dtype=bool if is_flag else object))
        made.append(one)
    return made


def told(result):
    return [result.as_numpy(name)[0] for name in NAMES]


with triton_grpc.InferenceServerClient(ADDRESS) as client:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("another")
    assert client.get_server_metadata().name == "baton"
    described = client.get_model_metadata(MODEL, as_json=True)
    assert described["inputs"][0]["name"] == "text_input", described
    outputs = [triton_grpc.InferRequestedOutput(name) for name in NAMES]
    over_grpc = told(client.infer(MODEL, inputs(triton_grpc), outputs=outputs, request_id="one"))
    text, reason, num_tokens = over_grpc
    assert text, over_grpc
    assert (reason, num_tokens) == (b"length", SAMPLING["max_tokens"]), over_grpc

    results = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    flags = {"stream": True, "return_finish_reason": True}
    for name in "ab":  # side by side
        client.async_stream_infer(
            MODEL, inputs(triton_grpc, **flags), request_id=name, enable_empty_final_response=True
        )
    texts, final = {"a": b"", "b": b""}, set()
    while len(final) < len(texts):
        result, error = results.get(timeout=120)
        assert error is None, error
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            final.add(response.id)
        else:
            texts[response.id] += result.as_numpy("text_output")[0]
    client.stop_stream()
    assert texts == {"a": text, "b": text}, (texts, text)

    try:
        client.infer(MODEL, inputs(triton_grpc, image=True))
    except InferenceServerException as error:
        assert "image" in error.message(), error
    else:
        raise AssertionError("an image was taken")

with triton_http.InferenceServerClient(URL.removeprefix("http://").removesuffix("/v1")) as client:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL)["name"] == MODEL
    for binary in (True, False):
        outputs = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in NAMES]
        over_rest = told(client.infer(MODEL, inputs(triton_http), outputs=outputs))
        same = [one.encode() if isinstance(one, str) else one for one in over_rest]
        assert same == over_grpc, (binary, over_rest, over_grpc)
    whole = client.infer(MODEL, inputs(triton_http))
    assert whole.as_numpy("text_output")[0] == text
    try:
        client.infer(MODEL, inputs(triton_http, image=True))
    except InferenceServerException as error:
        assert "image" in error.message(), error
    else:
        raise AssertionError("an image was taken")

with openai.OpenAI(base_url=URL, api_key="none", max_retries=0) as client:
    same = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=SAMPLING["max_tokens"])
    assert same.choices[0].text.encode() == text, (same, text)
