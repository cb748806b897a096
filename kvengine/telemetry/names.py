"""The names that spans carry: gen_ai.* of the OpenTelemetry GenAI conventions (v0.1.0), and our own."""

from __future__ import annotations

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

RUN_ID = "kvengine.run.id"
REQUEST_ID = "kvengine.request.id"
CHOICE = "kvengine.choice"
PAIR_KEY = "kvengine.pair.key"
STATUS = "kvengine.status"
NUM_PREEMPTIONS = "kvengine.num_preemptions"
NUM_RECOMPUTED_TOKENS = "kvengine.num_recomputed_tokens"
NUM_STEPS = "kvengine.num_steps"
SAMPLING = "kvengine.step_sampling"
STEP_SAMPLED_FOR = "kvengine.step.sampled_for"
POLICY = "kvengine.policy."
STEP = "kvengine.step."
