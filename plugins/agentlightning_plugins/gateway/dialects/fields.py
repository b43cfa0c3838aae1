"""The request fields of each API that the gateway passes on.

A field that is not listed never reaches a backend: libraries and servers have fields that choose where a request, with
the provider's key, is sent, such as litellm's ``base_url`` and vLLM's ``kv_transfer_params``.
"""

from __future__ import annotations

from typing import Final

_SAMPLING: Final = frozenset(
    # Fields of vLLM, SGLang, llama.cpp and providers with an API like OpenAI's.
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template_kwargs "
    "continue_final_message documents ebnf enable_thinking grammar guided_choice guided_grammar guided_json "
    "guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output json_schema "
    "length_penalty min_p min_tokens priority prompt_logprobs random_seed reasoning regex repetition_detection "
    "repetition_penalty return_token_ids return_tokens_as_token_ids separate_reasoning skip_special_tokens "
    "spaces_between_special_tokens stop_regex stop_token_ids structural_tag structured_outputs thinking "
    "thinking_budget thinking_token_budget top_a top_k truncate_prompt_tokens truncation_side typical_p "
    "use_beam_search".split()
)
CHAT_FIELDS: Final = _SAMPLING | frozenset(
    "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages "
    "metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key "
    "prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier "
    "stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity "
    "web_search_options".split()
)
COMPLETION_FIELDS: Final = _SAMPLING | frozenset(
    "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt response_format "
    "seed stop stream stream_options suffix temperature top_p user".split()
)
EMBEDDING_FIELDS: Final = frozenset(
    "add_special_tokens dimensions encoding_format input input_type model priority truncate_prompt_tokens user".split()
)
RESPONSE_FIELDS: Final = _SAMPLING | frozenset(
    "background context_management conversation include input instructions max_output_tokens max_tool_calls metadata "
    "model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user".split()
)
COUNT_FIELDS: Final = frozenset(
    "billing_policy cache_control compaction context_management mcp_servers messages model output_config speed system "
    "thinking tool_choice tools user_profile_id workspace_id".split()
)
GOOGLE_FIELDS: Final = frozenset(
    "cachedContent cached_content contents generateContentRequest generationConfig generation_config labels model "
    "safetySettings safety_settings stream systemInstruction system_instruction toolConfig tool_config tools".split()
)
MESSAGE_FIELDS: Final = (
    _SAMPLING
    | COUNT_FIELDS
    | frozenset(
        "container diagnostics fallback_credit_token fallbacks inference_geo max_tokens metadata service_tier "
        "stop_sequences stream temperature thread top_k top_p".split()
    )
)
