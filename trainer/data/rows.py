"""What a row may look like: text, prompt and completion, or messages."""

from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]

FORMATS = 'expected {"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}, ...]}'


def is_chat(row: Row) -> bool:
    return "messages" in row


def is_pair(row: Row) -> bool:
    return "prompt" in row and "completion" in row


def is_text(row: Row) -> bool:
    return "text" in row


def has_format(row: Row) -> bool:
    """Returns whether the row is text that a language model can be trained on."""
    return is_chat(row) or is_pair(row) or is_text(row)


def prompt_of(row: Row) -> str | None:
    """Returns what is asked: the prompt or the first user message; None for plain text.

    Of a prompt that is messages it is the text of all of them.
    """
    if is_chat(row):
        return next((message["content"] for message in row["messages"] if message["role"] == "user"), None)
    if is_text(row) and not is_pair(row):
        return None
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return "\n".join(message["content"] for message in prompt)
    return prompt


def find_row_problem(row: Row) -> str | None:
    """Returns what is wrong with the columns whose meaning is fixed; other columns are the task's affair."""
    for name in ("text", "prompt", "completion"):
        is_messages = name == "prompt" and "completion" not in row and isinstance(row.get(name), list)
        if name in row and not isinstance(row[name], str) and not is_messages:
            return f"expected a string in {name!r}, found {row[name]!r}"
    if "completion" in row and "prompt" not in row:
        return "expected 'prompt' beside 'completion'"
    if is_chat(row):
        return find_message_problem(row["messages"])
    return None


def find_format_problem(row: Row, first: Row) -> str | None:
    """Returns what a row lacks where the first row of its file is text to train on."""
    if has_format(first) and not has_format(row):
        return f"{FORMATS}, found {', '.join(row) or 'nothing'}"
    return None


def find_message_problem(messages: object, *, name: str = "messages") -> str | None:
    """Returns what is wrong with a list of messages, found under the name of a column."""
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages in {name!r}, found {messages!r}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"expected messages of the form {{'role', 'content'}}, found {message!r}"
        if not isinstance(message.get("content"), str):
            return f"expected a string in 'content' of each message, found {message!r}"
    return None
