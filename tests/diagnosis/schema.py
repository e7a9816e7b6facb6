"""The JSON schema of a diagnosis, and a checker of the few keywords that it uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def optional(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def fixed(properties: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object with exactly these keys."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def listed(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
REASONS = {"type": "object", "additionalProperties": STRING}
NUMBERS = {"type": "object", "additionalProperties": NUMBER}
BOUND = {"enum": ["memory", "compute", "overhead", "latency", "communication", "host", "balanced", None]}
UNIT = {"enum": ["HBM", "L2", "DRAM", "cache", "addresses", "tensor", "fp32", "fp64", "special", "int", "link", None]}
CONFIDENCE = {"enum": ["confirmed", "measured", "modelled", "contradicted"]}

OP = fixed(
    {
        "module": STRING, "op": STRING, "kernels": listed(STRING), "calls": INTEGER,
        "phase": {"enum": ["forward", "backward", "optimiser"]},
        "time_us": NUMBER, "in_context_us": optional("number"), "share": NUMBER,
        "flops": optional("integer"), "special": optional("integer"), "bytes": optional("integer"),
        "intensity": optional("number"), "roof": UNIT, "ceiling": optional("number"), "achieved": optional("number"),
        "roof_share": optional("number"), "bound": BOUND, "unit": UNIT, "modelled_bound": BOUND,
        "confidence": CONFIDENCE, "confirmed_by": STRING,
        "experiments": fixed({
            "alone": fixed({"time_us": optional("number"), "spread_us": optional("number")}),
            "intensity": fixed({
                "added_us": listed(NUMBER), "time_us": listed(NUMBER), "slope": optional("number"),
                "knee_flops_per_byte": optional("number"),
            }),
            "cache": fixed({"time_us": optional("number"), "gain": optional("number")}),
            "size": fixed({"fixed_us": optional("number")}),
            "why_not": REASONS,
        }),
        "where": STRING, "remedies": listed(INTEGER),
    }
)  # fmt: skip

COUNTER = fixed(
    {
        "module": STRING, "op": STRING, "phase": STRING, "bytes": optional("integer"), "dram_bytes": NUMBER,
        "l2_bytes": NUMBER, "flops": optional("integer"), "tensor_flops": optional("number"), "kernels": INTEGER,
        "dram_percent": NUMBER, "l2_percent": NUMBER, "sm_percent": NUMBER,
    }
)  # fmt: skip

SCHEMA = fixed(
    {
        "form": {"enum": ["rooftile.diagnosis/1"]},
        "machine": {"type": "object"},
        "ceilings": {"type": "object"},
        "program": fixed({"command": STRING, "step": STRING, "torch": STRING, "mode": {"enum": ["eager", "compiled", "graph"]}}),
        "step": fixed({
            "time_us": NUMBER, "spread_us": optional("number"), "launches": optional("integer"),
            "flops": optional("integer"), "bytes": optional("integer"), "peak_bytes": optional("integer"),
            "busy_us": optional("number"), "idle_us": NUMBERS, "overhead_share": optional("number"), "bound": BOUND,
            "shares": NUMBERS, "confidence": CONFIDENCE,
            "experiments": fixed({
                "graph_us": optional("number"), "half_batch_us": optional("number"),
                "double_batch_us": optional("number"), "why_not": REASONS,
            }),
            "host_us": NUMBERS,
        }),
        "ops": listed(OP),
        "remedies": listed(fixed({
            "name": STRING, "ops": listed(INTEGER), "predicted_us": NUMBER, "measured_us": optional("number"),
            "how": STRING, "changes": {"enum": ["nothing", "rounding", "memory"]},
        })),
        "uncounted": listed(STRING), "counters": listed(COUNTER), "notes": listed(STRING),
    }
)  # fmt: skip

TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "null": type(None)}


def breaches(value: Any, schema: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Yields each place where a value breaks the schema."""
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}; due {schema['enum']}"
    names = schema.get("type", list(TYPES))
    names = [names] if isinstance(names, str) else names
    # a bool is an int in Python, and no number in JSON
    if isinstance(value, bool) or not any(isinstance(value, TYPES[name]) for name in names):
        yield f"{path} is a {type(value).__name__}; due {names}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            other = schema.get("additionalProperties", {})
            if name in known:
                yield from breaches(item, known[name], f"{path}.{name}")
            elif other is False:
                yield f"{path}.{name} is not in the schema"
            else:
                yield from breaches(item, other, f"{path}.{name}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from breaches(item, schema.get("items", {}), f"{path}[{i}]")
