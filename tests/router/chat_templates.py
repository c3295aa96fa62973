"""Small chat templates that write tools and calls in the shapes of published models, made for these tests."""

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TAGGED = HERMES + "{# <tool_call><function=f><parameter=x> #}"
LLAMA = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
MISTRAL_LIST = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}"
    "[TOOL_CALLS] [{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]"
    "{% else %}[INST] {{ message.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "[INST]{{ message.content }}[/INST]{% endfor %}"
)
THINKS_AT_ONCE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)
