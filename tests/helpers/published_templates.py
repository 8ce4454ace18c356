"""Chat templates of published families, written down by their rules: what each writes, where, and what it leaves out.

The words of their instructions are shortened. A line here is a part of a template; ends of lines and indents are none.
"""

# ruff: noqa: E501, RUF001

from __future__ import annotations

from typing import NamedTuple

from chat_templates import CHATML, LLAMA32, LLAMA_CONTROLS, QWEN3, QWEN25, QWEN_CONTROLS, QWEN_TAGS, tokenizer_of

from megatron_rl.model.tokenizer import HuggingFaceTokenizer


class Published(NamedTuple):
    template: str
    eos: str
    controls: tuple[str, ...]
    tags: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()

    def tokenizer(self, renderer: str = "template") -> HuggingFaceTokenizer:
        return tokenizer_of(
            self.template, self.controls, self.tags, eos=self.eos, also_ends=self.also_ends, renderer=renderer
        )


def joined(lines: str) -> str:
    return "".join(line.strip() for line in lines.splitlines())


def qwen(template: str) -> Published:
    return Published(template, "<|im_end|>", QWEN_CONTROLS, QWEN_TAGS)


def llama(template: str) -> Published:
    return Published(template, "<|eot_id|>", LLAMA_CONTROLS)


# A thought is written again only behind the last question, and the next answer begins within one.
QWEN3_THINKING = QWEN3.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
assert QWEN3_THINKING != QWEN3

# Calls and tools are XML; a parameter that is text is written as it is.
QWEN3_CODER = joined(r"""
    {% if messages[0].role == "system" %}
        {% set system = messages[0].content %}{% set messages = messages[1:] %}
    {% endif %}
    {% if system is defined or tools %}
        {{ "<|im_start|>system\n" + (system if system is defined else "You are Qwen.") }}
        {% if tools %}
            {{ "\n\n# Tools\n\n<tools>" }}
            {% for tool in tools %}
                {% set tool = tool.function %}
                {{ "\n<function>\n<name>" + tool.name + "</name>\n<description>" + (tool.description or "") }}
                {{ "</description>\n<parameters>" }}
                {% for name, schema in (tool.parameters.properties or {}).items() %}
                    {{ "\n<parameter>\n<name>" + name + "</name>\n<type>" + (schema.type | string) + "</type>" }}
                    {{ "\n<description>" + (schema.description or "") | trim + "</description>\n</parameter>" }}
                {% endfor %}
                {{ "\n</parameters>\n</function>" }}
            {% endfor %}
            {{ "\n</tools>" }}
        {% endif %}
        {{ "<|im_end|>\n" }}
    {% endif %}
    {% for message in messages %}
        {% if message.role == "tool" %}
            {% if loop.previtem is not defined or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
            {{ "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
            {% if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
        {% elif message.tool_calls %}
            {{ "<|im_start|>assistant" }}
            {% if message.content | trim %}{{ "\n" + message.content | trim + "\n" }}{% endif %}
            {% for call in message.tool_calls %}
                {{ "\n<tool_call>\n<function=" + call.function.name + ">" }}
                {% for name, value in call.function.arguments.items() %}
                    {% set text = value if value is string else value | tojson if value is mapping or value is sequence else value | string %}
                    {{ "\n<parameter=" + name + ">\n" + text + "\n</parameter>" }}
                {% endfor %}
                {{ "\n</function>\n</tool_call>" }}
            {% endfor %}
            {{ "<|im_end|>\n" }}
        {% else %}
            {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""")

# Texts are stripped; neither tools nor calls.
LLAMA30 = joined(r"""
    {% for message in messages %}
        {% if loop.first %}{{ bos_token }}{% endif %}
        {{ "<|start_header_id|>" + message.role + "<|end_header_id|>\n\n" + message.content | trim + "<|eot_id|>" }}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{% endif %}
""")
LLAMA31 = LLAMA32.replace("{%- if strftime_now is defined %}", "{%- if false %}")
LLAMA33 = LLAMA31.replace("tools_in_user_message = true", "tools_in_user_message = false")  # a switch of the template

# System and tools stand before the last question, a call drops the content, ids have nine letters.
_MISTRAL_CALLS = r"""
        {% elif message.tool_calls %}
            {{ "[TOOL_CALLS]SPACE[" }}
            {% for call in message.tool_calls %}
                {% if call.id is not defined or call.id | length != 9 %}
                    {{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
                {% endif %}
                {{ call.function | tojson }}
                {% if not loop.last %}{{ ", " }}{% endif %}
            {% endfor %}
            {{ "]" + eos_token }}
        {% elif message.role == "assistant" %}
            {{ "SPACE" + message.content | trim + eos_token }}
        {% elif message.role == "tool" %}
            {{ "[TOOL_RESULTS]SPACE" + {"content": message.content, "call_id": message.tool_call_id} | tojson }}
            {{ "[/TOOL_RESULTS]" }}
"""
_MISTRAL = (
    r"""
    {% set start = 0 %}
    {% if messages[0].role == "system" %}{% set system = messages[0].content %}{% set start = 1 %}{% endif %}
    {% set messages = messages[start:] %}
    {% set asked = messages | selectattr("role", "equalto", "user") | list %}
    {{ bos_token }}
    {% for message in messages %}
        {% if message.role == "user" %}
            {% if message == asked[-1] and tools %}
                {{ "[AVAILABLE_TOOLS]SPACE" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
            {% endif %}
            {{ "[INST]SPACE" }}
            {% if message == asked[-1] and system is defined %}{{ system + "\n\n" }}{% endif %}
            {{ message.content + "[/INST]" }}
"""
    + _MISTRAL_CALLS
    + r"""
        {% else %}{{ raise_exception("Only user and assistant roles are supported!") }}
        {% endif %}
    {% endfor %}
"""
)
MISTRAL_V03 = joined(_MISTRAL).replace("SPACE", " ")
MISTRAL_NEMO = joined(_MISTRAL).replace("SPACE", "")
MISTRAL_SMALL = joined(
    r"""
    {{ bos_token }}
    {% for message in messages %}
        {% if message.role == "system" %}{{ "[SYSTEM_PROMPT]" + message.content + "[/SYSTEM_PROMPT]" }}
        {% elif message.role == "user" %}{{ "[INST]" + message.content + "[/INST]" }}
        {% elif message.role == "assistant" %}{{ message.content + eos_token }}
        {% else %}{{ raise_exception("Only user, system and assistant roles are supported!") }}
        {% endif %}
    {% endfor %}
"""
)

# The roles are user and model, and must alternate. Gemma 2 has no system message; Gemma 3 writes it above the question.
_GEMMA = r"""
    {{ bos_token }}
    {% set start = namespace(text="") %}
    SYSTEM
    {% for message in messages %}
        {% if (message.role == "user") != (loop.index0 % 2 == 0) %}
            {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
        {% endif %}
        {{ "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\n" }}
        {% if loop.first %}{{ start.text }}{% endif %}
        {{ message.content | trim + "<end_of_turn>\n" }}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<start_of_turn>model\n" }}{% endif %}
"""
GEMMA2 = joined(
    _GEMMA.replace(
        "SYSTEM", ('{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}')
    )
)
GEMMA3 = joined(
    _GEMMA.replace(
        "SYSTEM",
        (
            '{% if messages[0].role == "system" %}{% set start.text = messages[0].content + "\n\n" %}'
            "{% set messages = messages[1:] %}{% endif %}"
        ).replace("\n", "\\n"),
    )
)

# All system messages come first. R1 drops what stands before </think>, and the next answer begins within a thought.
_DEEPSEEK = r"""
    {% set ns = namespace(system="") %}
    {% for message in messages if message.role == "system" %}{% set ns.system = ns.system + message.content %}{% endfor %}
    {{ bos_token + ns.system }}
    {% if tools %}
        {{ "\n\n## Tools\nYou have access to the following tools:\n" }}
        {% for tool in tools %}{{ "\n### " + tool.function.name + "\nDescription: " + (tool.function.description or "") }}
            {{ "\n\nParameters: " + tool.function.parameters | tojson + "\n" }}{% endfor %}
    {% endif %}
    {% for message in messages %}
        {% if message.role == "user" %}{{ "<｜User｜>" + message.content }}
        {% elif message.role == "tool" %}
            {{ "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}
        {% elif message.role == "assistant" %}
            {{ "<｜Assistant｜>" + (message.content.split("</think>")[-1] if THINKS else message.content) }}
            {% if message.tool_calls %}
                {{ "<｜tool▁calls▁begin｜>" }}
                {% for call in message.tool_calls %}
                    {{ "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + call.function.name + "\n```json\n" }}
                    {{ call.function.arguments | tojson + "\n```<｜tool▁call▁end｜>" }}
                {% endfor %}
                {{ "<｜tool▁calls▁end｜>" }}
            {% endif %}
            {{ "<｜end▁of▁sentence｜>" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<｜Assistant｜>" + ("<think>\n" if THINKS else "") }}{% endif %}
"""
DEEPSEEK_V3 = joined(_DEEPSEEK.replace("THINKS", "false"))
DEEPSEEK_R1 = joined(_DEEPSEEK.replace("THINKS", "true"))

# A turn ends where the next one begins; arguments are keys and values; thoughts stay behind the last question only.
GLM45 = joined(r"""
    [gMASK]<sop>
    {% if tools %}
        {{ "<|system|>\n# Tools\n\n<tools>\n" }}
        {% for tool in tools %}{{ tool | tojson + "\n" }}{% endfor %}
        {{ "</tools>" }}
    {% endif %}
    {% set ns = namespace(last=-1) %}
    {% for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
    {% for message in messages %}
        {% if message.role == "user" %}{{ "<|user|>\n" + message.content }}
        {% elif message.role == "assistant" %}
            {{ "<|assistant|>" }}
            {% set thought = message.reasoning_content or "" %}
            {% set content = message.content %}
            {% if not thought and "</think>" in content %}
                {% set thought = content.split("</think>")[0].split("<think>")[-1] %}
                {% set content = content.split("</think>")[-1] %}
            {% endif %}
            {% if loop.index0 > ns.last and thought %}{{ "\n<think>" + thought.strip() + "</think>" }}
            {% else %}{{ "\n<think></think>" }}{% endif %}
            {% if content.strip() %}{{ "\n" + content.strip() }}{% endif %}
            {% for call in message.tool_calls or [] %}
                {{ "\n<tool_call>" + call.function.name + "\n" }}
                {% for name, value in call.function.arguments.items() %}
                    {{ "<arg_key>" + name + "</arg_key>\n<arg_value>" }}
                    {{ (value if value is string else value | tojson) + "</arg_value>\n" }}
                {% endfor %}
                {{ "</tool_call>" }}
            {% endfor %}
        {% elif message.role == "tool" %}
            {% if loop.previtem is not defined or loop.previtem.role != "tool" %}{{ "<|observation|>" }}{% endif %}
            {{ "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {% elif message.role == "system" %}{{ "<|system|>\n" + message.content }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}
""")

# gpt-oss: tools are TypeScript, calls go to a recipient, and a thought stays until the answer that follows it.
HARMONY = joined(r"""
    {{ "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final." }}
    {{ "<|end|>" }}
    {% if messages[0].role == "system" %}
        {% set system = messages[0].content %}{% set messages = messages[1:] %}
    {% endif %}
    {% if system is defined or tools %}
        {{ "<|start|>developer<|message|>" }}
        {% if system is defined %}{{ "# Instructions\n\n" + system + "\n\n" }}{% endif %}
        {% if tools %}
            {{ "# Tools\n\n## functions\n\nnamespace functions {\n\n" }}
            {% for tool in tools %}
                {% set tool = tool.function %}
                {{ "// " + (tool.description or "") + "\ntype " + tool.name + " = (_: {\n" }}
                {% for name, schema in (tool.parameters.properties or {}).items() %}
                    {{ name + "?: " + (schema.type or "any") + ",\n" }}
                {% endfor %}
                {{ "}) => any;\n\n" }}
            {% endfor %}
            {{ "} // namespace functions" }}
        {% endif %}
        {{ "<|end|>" }}
    {% endif %}
    {% set ns = namespace(called="") %}
    {% for message in messages %}
        {% if message.role == "assistant" and message.tool_calls %}
            {% if message.tool_calls | length != 1 %}{{ raise_exception("Only one tool call at a time") }}{% endif %}
            {% set later = messages[loop.index0 + 1:] | selectattr("role", "equalto", "assistant") | list %}
            {% if message.content and message.reasoning_content %}
                {{ raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {% elif message.content %}
                {{ "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {% elif message.reasoning_content and later | rejectattr("tool_calls", "defined") | list | length == 0 %}
                {{ "<|start|>assistant<|channel|>analysis<|message|>" + message.reasoning_content + "<|end|>" }}
            {% endif %}
            {% set call = message.tool_calls[0].function %}
            {% set ns.called = call.name %}
            {{ "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{ call.arguments | tojson + "<|call|>" }}
        {% elif message.role == "assistant" %}
            {% if loop.last and message.reasoning_content %}
                {{ "<|start|>assistant<|channel|>analysis<|message|>" + message.reasoning_content + "<|end|>" }}
            {% endif %}
            {{ "<|start|>assistant<|channel|>final<|message|>" + message.content }}
            {{ "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
        {% elif message.role == "tool" %}
            {% if not ns.called %}{{ raise_exception("Message has tool role, but there was no previous tool call!") }}
            {% endif %}
            {{ "<|start|>functions." + ns.called + " to=assistant<|channel|>commentary<|message|>" }}
            {{ message.content | tojson + "<|end|>" }}
        {% else %}
            {{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}
""")

# Roles that the template does not name are left out without a word.
PHI3 = joined(r"""
    {% for message in messages %}
        {% if message.role in ["system", "user", "assistant"] %}
            {{ "<|" + message.role + "|>\n" + message.content + "<|end|>\n" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
""")
PHI4 = joined(r"""
    {% for message in messages %}
        {% if message.role in ["system", "user", "assistant"] %}
            {{ "<|im_start|>" + message.role + "<|im_sep|>" + message.content + "<|im_end|>" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_start|>assistant<|im_sep|>" }}{% endif %}
""")

# OLMo 2 and Tulu 3: the end token stands behind answers.
OLMO2 = joined(r"""
    {{ bos_token }}
    {% for message in messages %}
        {% if message.role in ["system", "user"] %}{{ "<|" + message.role + "|>\n" + message.content + "\n" }}
        {% elif message.role == "assistant" %}
            {{ "<|assistant|>\n" + message.content + eos_token }}{% if not loop.last %}{{ "\n" }}{% endif %}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
""")
ZEPHYR = joined(r"""
    {% for message in messages %}
        {% if message.role in ["system", "user", "assistant"] %}
            {{ "<|" + message.role + "|>\n" + message.content + eos_token + "\n" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
""")

# Hermes writes bare functions, and each result in its own turn.
HERMES = joined(r"""
    {% if tools %}
        {{ "<|im_start|>system\nYou are a function calling AI model. Here are the available tools: <tools> " }}
        {% for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}{{ "\n" }}{% endif %}{% endfor %}
        {{ " </tools><|im_end|>\n" }}
    {% endif %}
    {% for message in messages %}
        {% if message.role == "tool" %}
            {{ "<|im_start|>tool\n<tool_response>\n" + message.content + "\n</tool_response><|im_end|>\n" }}
        {% else %}
            {{ "<|im_start|>" + message.role + "\n" + message.content }}
            {% for call in message.tool_calls or [] %}
                {{ "\n<tool_call>\n" + {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
                {{ "\n</tool_call>" }}
            {% endfor %}
            {{ "<|im_end|>\n" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""")

SMOLLM2 = joined(r"""
    {% for message in messages %}
        {% if loop.first and message.role != "system" %}{{ "<|im_start|>system\nYou are SmolLM.<|im_end|>\n" }}{% endif %}
        {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""")
# An answer begins with an empty thought unless the model is to think; calls are not written.
SMOLLM3 = joined(r"""
    {{ "<|im_start|>system\n## Metadata\n\n## Custom Instructions\n\n" }}
    {% if messages[0].role == "system" %}{{ messages[0].content.replace("/no_think", "").rstrip() }}{% endif %}
    {% if tools %}{{ "\n\n### Tools\n<tools>\n" }}
        {% for tool in tools %}{{ tool.function | string + "\n" }}{% endfor %}{{ "</tools>" }}{% endif %}
    {{ "<|im_end|>\n" }}
    {% for message in messages %}
        {% if message.role == "user" %}{{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
        {% elif message.role == "assistant" %}
            {{ "<|im_start|>assistant\n" + message.content.lstrip("\n") + "<|im_end|>\n" }}
        {% elif message.role == "tool" %}{{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""")

# The name of a message replaces that of its role. A call is its id, such as functions.look_up:0; its name is not written.
KIMI_K2 = joined(r"""
    {% if tools %}{{ "<|im_system|>tool_declare<|im_middle|>" + tools | tojson + "<|im_end|>" }}{% endif %}
    {% for message in messages %}
        {% set name = message.name or message.role %}
        {{ "<|im_" + ("system" if message.role in ["system", "tool"] else message.role) + "|>" + name + "<|im_middle|>" }}
        {% if message.role == "tool" %}{{ "## Return of " + (message.tool_call_id or "") + "\n" }}{% endif %}
        {{ message.content }}
        {% if message.tool_calls %}
            {{ "<|tool_calls_section_begin|>" }}
            {% for call in message.tool_calls %}
                {{ "<|tool_call_begin|>" + call.id }}
                {{ "<|tool_call_argument_begin|>" + call.function.arguments | tojson + "<|tool_call_end|>" }}
            {% endfor %}
            {{ "<|tool_calls_section_end|>" }}
        {% endif %}
        {{ "<|im_end|>" }}
    {% endfor %}
    {% if add_generation_prompt %}{{ "<|im_assistant|>assistant<|im_middle|>" }}{% endif %}
""")

_MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
_DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_TAGS = (
    "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY_TOKENS = (
    "<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|endoftext|>",
)  # fmt: skip
_KIMI_TOKENS = (
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip

PUBLISHED = {
    "chatml": qwen(CHATML),
    "qwen2.5": qwen(QWEN25),
    "qwen3": qwen(QWEN3),
    "qwen3-thinking-2507": qwen(QWEN3_THINKING),
    "qwen3-coder": qwen(QWEN3_CODER),
    "llama-3.0": llama(LLAMA30),
    "llama-3.1": llama(LLAMA31),
    "llama-3.2": llama(LLAMA32),
    "llama-3.3": llama(LLAMA33),
    "mistral-v0.3": Published(MISTRAL_V03, "</s>", _MISTRAL_TOKENS),
    "mistral-nemo": Published(MISTRAL_NEMO, "</s>", _MISTRAL_TOKENS),
    "mistral-small": Published(MISTRAL_SMALL, "</s>", _MISTRAL_TOKENS),
    "gemma-2": Published(GEMMA2, "<end_of_turn>", _GEMMA_TOKENS),
    "gemma-3": Published(GEMMA3, "<end_of_turn>", _GEMMA_TOKENS),
    "deepseek-v3": Published(DEEPSEEK_V3, _DEEPSEEK_TOKENS[1], _DEEPSEEK_TOKENS, _DEEPSEEK_TAGS),
    "deepseek-r1": Published(DEEPSEEK_R1, _DEEPSEEK_TOKENS[1], _DEEPSEEK_TOKENS, _DEEPSEEK_TAGS),
    "glm-4.5": Published(GLM45, "<|user|>", _GLM_TOKENS, ("<think>", "</think>"), ("<|observation|>",)),
    "gpt-oss": Published(HARMONY, "<|return|>", _HARMONY_TOKENS, (), ("<|call|>",)),
    "phi-3": Published(PHI3, "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "phi-4": Published(PHI4, "<|im_end|>", ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    "olmo-2": Published(OLMO2, "<|endoftext|>", ("<|endoftext|>",)),
    "zephyr": Published(ZEPHYR, "</s>", ("<s>", "</s>")),
    "hermes": qwen(HERMES),
    "smollm2": qwen(SMOLLM2),
    "smollm3": qwen(SMOLLM3),
    "kimi-k2": Published(KIMI_K2, "<|im_end|>", _KIMI_TOKENS),
}

LIBRARY_TOKENS = """
    </arg_key:opensource> </arg_key> </arg_value:opensource> </arg_value> </assistant> </minimax:tool_call>
    </think:opensource> </think> </tool_call:opensource> </tool_call> </tool_calls:opensource>
    </tool_response:opensource> </tool_response> </tool_responses:opensource> <arg_key:opensource> <arg_key>
    <arg_value:opensource> <arg_value> <assistant> <bos> <channel|> <eos> <image> <image|> <minimax:tool_call> <sop>
    <think:opensource> <think> <tool_call:opensource> <tool_call> <tool_calls:opensource> <tool_call|>
    <tool_response:opensource> <tool_response> <tool_responses:opensource> <tool_response|> <tool_sep:opensource>
    <tool|> <turn|> <|assistant|> <|audio_end|> <|begin_of_text|> <|channel> <|content_audio_input|>
    <|content_image|> <|content_invoke_tool_json|> <|content_invoke_tool_text|> <|content_model_end_sampling|>
    <|content_text|> <|content_thinking|> <|content_xml|> <|end_header_id|> <|end_message|> <|end_of_text|>
    <|endoftext|> <|eom_id|> <|eot_id|> <|im_assistant|> <|im_end|> <|im_middle|> <|im_start|> <|im_system|>
    <|im_user|> <|image> <|image_pad|> <|image|> <|media_begin|> <|media_content|> <|media_end|> <|media_pad|>
    <|message_model|> <|message_system|> <|message_tool|> <|message_user|> <|observation|> <|start_header_id|>
    <|system|> <|think|> <|tool> <|tool_call> <|tool_call_argument_begin|> <|tool_call_begin|> <|tool_call_end|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_response> <|turn> <|unused_200053|>
    <|unused_200054|> <|user|> <|video_pad|> <|vision_end|> <|vision_start|> <｜Assistant｜> <｜User｜> <｜action｜>
    <｜authority｜> <｜begin▁of▁sentence｜> <｜domain｜> <｜end▁of▁sentence｜> <｜hy_Assistant:opensource｜>
    <｜hy_User:opensource｜> <｜hy_begin_of_sentence:opensource｜> <｜hy_eos:opensource｜> <｜latest_reminder｜> <｜query｜>
    <｜read_url｜> <｜reasoning_mode:opensource｜> <｜title｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
    <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
    <｜tool▁sep｜> [e~[ [gMASK] ]~!b[ ]~b] 〈|EOS|〉 ｜DSML｜
"""
"""Names that the library's renderers look up in a tokenizer."""


def library_tokenizer() -> HuggingFaceTokenizer:
    """A tokenizer that fits the library's renderers."""
    tags = tuple(name for name in LIBRARY_TOKENS.split() if name in QWEN_TAGS)
    return tokenizer_of(CHATML, tuple(name for name in LIBRARY_TOKENS.split() if name not in tags), tags)
