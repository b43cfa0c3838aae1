"""The OpenAPI document of the store server; tests/security/test_store_fuzz.py checks the answers against it."""

from __future__ import annotations

import jsonschema

from agentlightning.resources import LLM, PromptTemplate
from agentlightning_plugins.stores.http.server import routes
from tests.plugins.stores.served import ask, serve


async def test_every_route_is_described_with_its_answers() -> None:
    async with serve() as (server, _):
        status, document = await ask(server, "GET", "/openapi.json")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    operations = {(method.upper(), path): op for path, ops in document["paths"].items() for method, op in ops.items()}
    table = {(route.method, "/v1/agl" + route.path) for route in routes.ROUTES}
    others = {("GET", "/v1/agl/events"), ("POST", "/v1/traces"), ("GET", "/metrics"), ("GET", "/openapi.json")}
    probes = {("GET", "/livez"), ("GET", "/readyz")}
    assert set(operations) == table | others | probes
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for (method, path), operation in operations.items():
        assert operation["summary"], path
        assert {"401", "403", "422", "503"} <= set(operation["responses"])
        if method == "POST":
            assert {"400", "413"} <= set(operation["responses"]) or "requestBody" not in operation
    enqueue = operations["POST", "/v1/agl/queues/rollouts/enqueue"]
    assert enqueue["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/EnqueueRollouts")
    batch = document["components"]["schemas"]["EnqueueRollouts"]["properties"]["rollouts"]
    assert batch["maxItems"] == 100_000


async def test_the_schema_of_an_answer_accepts_resources_of_every_type() -> None:
    async with serve() as (server, store):
        await store.add_resources(
            {"prompt": PromptTemplate("Say {word}"), "llm": LLM(endpoint="http://x/v1", model="m")}
        )
        _, document = await ask(server, "GET", "/openapi.json")
        _, answer = await ask(server, "GET", "/v1/agl/resources/latest")
    assert set(answer["resources"]) == {"prompt", "llm"}
    schema = document["paths"]["/v1/agl/resources/latest"]["get"]["responses"]["200"]["content"]["application/json"]
    check = jsonschema.Draft202012Validator({**schema["schema"], "components": document["components"]})
    check.validate(answer)
    answer["resources"]["llm"].pop("resource_type")
    assert not check.is_valid(answer)
