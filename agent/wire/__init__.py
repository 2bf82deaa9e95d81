"""Everything that crosses MQTT, as frozen types: each has one reader, one writer and one set of limits.

`topics` has every topic; `properties`, `content_types` and `tensors` describe payloads. Each document has a
file: `presence`, `info`, `model_state` and `metrics` (what an agent publishes about itself), `request` with
`envelope`, and `answer` (inference), `desired`, `reported`, `job` and `blocks` (deployment). `document` holds
the JSON rules that they share.

Promises: bytes in, frozen values out, and back. No input or output, no numpy. The agent, `builder.fleet`
and the tests use these types, and docs/asyncapi.yaml is tested against them.
Leaves to others: connections, and the effect of a document.

Readers of what a client sends to an agent are strict: an unknown or duplicate key is an error. Readers of
what an agent sends are tolerant: an unknown key is ignored, so that an older client understands a newer
agent.
"""
