"""What the tokenizers and generation configs of published models say about turns, written by hand.

The templates lie without the files of their models, so this table gives for each template the tokens that begin and end
an assistant's turn, and the model's EOS tokens. `benchmarks/chat_templates/judge.py` compares masks with it.
"""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """Tokens of a model. `eos[0]` is the tokenizer's EOS, and all are those of generation_config.json."""

    eos: tuple[str, ...]
    ends: tuple[str, ...] = ()  # what the template writes at the end of an assistant's turn; none: it writes nothing
    opens: tuple[str, ...] = ()  # what begins an assistant's turn and is never supervised
    bos: str | None = None
    added: tuple[str, ...] = ()  # special tokens that are not found in the template by their form
    after: tuple[str, str] | None = None  # what ends the last turn if the template does not: after text, after calls
    inside: bool = False  # whether an assistant's turn may have several messages, each with an opener
    resumes: tuple[str, ...] = ()  # what ends the result of a tool after which a turn goes on without an opener


CHATML = Family(("<|im_end|>", "<|endoftext|>"), ("<|im_end|>",), ("<|im_start|>assistant",))
LLAMA = Family(
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    ("<|eot_id|>", "<|eom_id|>"),
    ("<|start_header_id|>assistant<|end_header_id|>",),
    "<|begin_of_text|>",
)
COHERE = Family(
    ("<|END_OF_TURN_TOKEN|>",),
    ("<|END_OF_TURN_TOKEN|>",),
    ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",),
    "<BOS_TOKEN>",
)
GLM = Family(
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    (),
    ("<|assistant|>",),
    "[gMASK]",
    after=("<|user|>", "<|observation|>"),
)
DEEPSEEK = Family(
    ("<｜end▁of▁sentence｜>",),
    ("<｜end▁of▁sentence｜>",),
    ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>", "</function_results>"),
    "<｜begin▁of▁sentence｜>",
)
MISTRAL = Family(("</s>",), ("</s>",), ("[/INST]", "[/TOOL_RESULTS]"), "<s>")
KIMI = Family(("<|im_end|>", "[EOS]"), ("<|im_end|>",), ("<|im_assistant|>assistant<|im_middle|>",), "[BOS]")
GIGACHAT = Family(("<|message_sep|>", "</s>"), ("<|message_sep|>",), ("assistant<|role_sep|>",), "<s>")
GRANITE = Family(
    ("<|end_of_text|>",),
    ("<|end_of_text|>",),
    ("<|start_of_role|>assistant<|end_of_role|>",),
    "<|end_of_text|>",
)
MINIMAX = Family(("[e~[",), ("[e~[",), ("]~b]ai",), "]~!b[", added=("]~b]",))
GEMMA4 = Family(
    ("<eos>", "<turn|>", "<|tool_response>"),
    ("<turn|>", "<|tool_response>"),
    ("<|turn>model", "<tool_response|>"),
    "<bos>",
    added=("<|turn>", "<|tool_call>", "<tool_call|>", "<tool_response|>", "<|channel>", "<channel|>", "<|tool>"),
)
LAGUNA = Family(
    ("〈|EOS|〉", "</assistant>"),
    ("</assistant>",),
    ("<assistant>",),
    "〈|EOS|〉",
    added=("<assistant>",),
)
HY3 = "<think> </think> <tool_calls> </tool_calls> <tool_call> </tool_call> <tool_sep> <arg_key> </arg_key> <arg_value>"
HY3 += " </arg_value> <tool_responses> </tool_responses> <tool_response> </tool_response>"

FAMILIES = {
    "Apertus-8B-Instruct": Family(
        ("<|assistant_end|>", "<|tools_suffix|>"),
        ("<|assistant_end|>", "<|tools_suffix|>"),
        ("<|assistant_start|>",),
        "<s>",
        resumes=("]",),
    ),
    "Apriel-1.6-15b-Thinker-fixed": Family(("<|end|>",), ("<|end|>",), ("<|begin_assistant|>",), "<s>"),
    "Bielik-11B-v3.0-Instruct": replace(CHATML, eos=("<|im_end|>", "</s>"), bos="<s>"),
    "ByteDance-Seed-OSS": Family(("<seed:eos>",), ("<seed:eos>",), ("<seed:bos>assistant",), "<seed:bos>"),
    "Cohere2MoE": COHERE,
    "CohereForAI-c4ai-command-r-plus-tool_use": COHERE,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": COHERE,
    "GLM-4.6": GLM,
    "GLM-4.7-Flash": GLM,
    "GigaChat3-10B-A1.8B": GIGACHAT,
    "GigaChat3.1-10B-A1.8B": GIGACHAT,
    "HuggingFaceTB-SmolLM3-3B": CHATML,
    "Kimi-K2-Instruct": KIMI,
    "Kimi-K2-Thinking": KIMI,
    "Kimi-K3": replace(
        KIMI, eos=("<|end_of_msg|>", "[EOS]"), ends=("<|end_of_msg|>",), opens=('<|open|>message role="assistant"',)
    ),
    "LFM2-8B-A1B": replace(CHATML, bos="<|startoftext|>"),
    "LFM2.5-8B-A1B": replace(CHATML, bos="<|startoftext|>"),
    "LFM2.5-Instruct": replace(CHATML, bos="<|startoftext|>"),
    "MiMo-VL": CHATML,
    "MiniMax-M1": Family(
        ("<end_of_sentence>",),
        ("<end_of_sentence>",),
        ("<beginning_of_sentence>ai name=assistant",),
        added=("<end_of_sentence>", "<beginning_of_sentence>", "<begin_of_document>"),
    ),
    "MiniMax-M2": MINIMAX,
    "MiniMax-M3": MINIMAX,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": CHATML,
    "NVIDIA-Nemotron-Nano-v2": Family(
        ("<SPECIAL_12>", "</s>"),
        ("<SPECIAL_12>",),
        ("<SPECIAL_11>Assistant",),
        "<s>",
        added=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": replace(CHATML, bos="<|begin_of_text|>"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": replace(CHATML, bos="<|begin_of_text|>"),
    "Qwen-QwQ-32B": CHATML,
    "Qwen-Qwen2.5-7B-Instruct": CHATML,
    "Qwen-Qwen3-0.6B": CHATML,
    "Qwen3-Coder": CHATML,
    "Qwen3.5-4B": CHATML,
    "Reka-Edge": Family(("<|endoftext|>", "<sep>"), ("<sep>",), ("<sep>assistant:",), added=("<sep>",)),
    "Spark2.5": Family(
        ("<｜end▁of▁sentence｜>",),
        ("<｜end▁of▁sentence｜>",),
        ("<｜start▁of▁sentence｜><|Bot|>",),
        "<｜start▁of▁sentence｜>",
    ),
    "StepFun3.5-Flash": replace(CHATML, bos="<｜begin▁of▁sentence｜>"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": DEEPSEEK,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": DEEPSEEK,
    "deepseek-ai-DeepSeek-V3.1": DEEPSEEK,
    "deepseek-ai-DeepSeek-V3.2": DEEPSEEK,
    "deepseek-ai-DeepSeek-V4-Flash-0731": DEEPSEEK,
    "deepseek-ai-DeepSeek-V4": DEEPSEEK,
    "fireworks-ai-llama-3-firefunction-v2": LLAMA,
    "google-gemma-2-2b-it": Family(
        ("<eos>", "<end_of_turn>"),
        ("<end_of_turn>",),
        ("<start_of_turn>model",),
        "<bos>",
        added=("<start_of_turn>", "<end_of_turn>"),
    ),
    "google-gemma-4-31B-it-interleaved": GEMMA4,
    "google-gemma-4-31B-it": GEMMA4,
    "ibm-granite-granite-3.3-2B-Instruct": GRANITE,
    "ibm-granite-granite-4.0": GRANITE,
    "ibm-granite-granite-4.1": GRANITE,
    "inclusionai-ling-3.0-flash": Family(
        ("<|endoftext|>", "<|role_end|>"), ("<|role_end|>",), ("<role>ASSISTANT</role>",), added=("<role>", "</role>")
    ),
    "llama-cpp-deepseek-r1": DEEPSEEK,
    "llama-cpp-rwkv-world": Family(("<|endoftext|>",), (), ("Assistant:",), "<|endoftext|>"),
    "meetkai-functionary-medium-v3.1": LLAMA,
    "meetkai-functionary-medium-v3.2": LLAMA,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    # Its generation config counts the opener of the assistant among the EOS tokens.
    "microsoft-Phi-3.5-mini-instruct": Family(
        ("<|endoftext|>", "<|end|>", "<|assistant|>"), ("<|end|>", "<|endoftext|>"), ("<|assistant|>",), "<s>"
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": MISTRAL,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "moonshotai-Kimi-K2": KIMI,
    "muse-glimmer": Family(
        ("<|eot|>", "<|eom|>"), ("<|eot|>", "<|eom|>"), ("<|start|>assistant",), "<|begin_of_text|>", inside=True
    ),
    "openai-gpt-oss-120b": Family(
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        ("<|return|>", "<|call|>", "<|end|>"),
        ("<|start|>assistant",),
        "<|startoftext|>",
        added=("<|constrain|>",),
        inside=True,
    ),
    "openbmb-MiniCPM5-1B": replace(CHATML, eos=("</s>", "<|im_end|>"), bos="<s>"),
    "poolside-Laguna-S-2.1": LAGUNA,
    "poolside-Laguna-XS-2.1": LAGUNA,
    "poolside-Laguna-XS.2": LAGUNA,
    "tencent-Hy3": Family(
        ("<｜hy_eos:opensource｜>",),
        ("<｜hy_eos:opensource｜>",),
        ("<｜hy_Assistant:opensource｜>",),
        "<｜hy_begin_of_sentence:opensource｜>",
        added=("<｜hy_User:opensource｜>", *(tag.replace(">", ":opensource>") for tag in HY3.split())),
    ),
    "unsloth-Apriel-1.5": Family(("</s>", "<|end|>"), ("<|end|>", "</s>"), ("<|assistant|>",), "<s>"),
    "unsloth-mistral-Devstral-Small-2507": MISTRAL,
    "upstage-Solar-Open-100B": Family(
        ("<|end|>", "<|calls|>", "<|endoftext|>"),
        ("<|end|>", "<|calls|>"),
        ("<|begin|>assistant",),
        "<|startoftext|>",
    ),
}

# Of the forms of special tokens: <|im_end|>, <｜User｜>, [INST], <seed:eos>.
SPECIAL = re.compile(
    r"<\|[^|<>{}\s]{1,40}\|>|<｜[^｜<>{}\s]{1,40}｜>|\[/?[A-Z]+(?:_[A-Z]+)*\]|\[gMASK\]|<sop>|</?seed:\w+>"
)
# Added to vocabularies as single tokens, but not as special ones.
ADDED = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|mm:think|minimax:tool_call)>")


def special_tokens(template: str, family: Family) -> list[str]:
    """The special tokens of a tokenizer for the template, without duplicates."""
    found = [*family.eos, *family.ends, *family.added, *SPECIAL.findall(template)]
    return list(dict.fromkeys([family.bos, *found] if family.bos else found))


def added_tokens(template: str) -> list[str]:
    return sorted(set(ADDED.findall(template)))
