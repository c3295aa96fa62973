"""KServe's client, unchanged, over REST and gRPC."""

import asyncio
import json
import sys

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

URL, MODEL, ADDRESS = sys.argv[1:4]
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 12})


def asked():
    inputs = [
        InferInput("text_input", [1], "BYTES", ["The capital of Japan is"]),
        InferInput("sampling_parameters", [1], "BYTES", [SAMPLING]),
        InferInput("exclude_input_in_output", [1], "BOOL", [True]),
    ]
    outputs = [RequestedOutput("text_output"), RequestedOutput("finish_reason")]
    return InferRequest(MODEL, inputs, request_id="one", request_outputs=outputs)


def told(response):
    assert (response.model_name, response.id) == (MODEL, "one"), response
    assert [output.name for output in response.outputs] == ["text_output", "finish_reason"], response
    values = [output.data[0] for output in response.outputs]
    return [value if isinstance(value, str) else value.decode() for value in values]


async def main():
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=120))
    base = URL.removesuffix("/v1")
    assert await rest.is_server_live(base)
    assert await rest.is_server_ready(base)
    assert await rest.is_model_ready(base, MODEL)
    over_rest = told(await rest.infer(base, asked(), model_name=MODEL))
    await rest.close()

    grpc = InferenceGRPCClient(ADDRESS, retries=0, timeout=120)
    assert await grpc.is_server_live()
    assert await grpc.is_server_ready()
    assert await grpc.is_model_ready(MODEL)
    over_grpc = told(await grpc.infer(asked()))
    await grpc.close()
    assert over_rest == over_grpc, (over_rest, over_grpc)
    assert over_rest[0], over_rest
    assert over_rest[1] == "length", over_rest


asyncio.run(main())
