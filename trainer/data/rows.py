"""What a row may look like: text, prompt and completion, or messages."""

from typing import Any

Row = dict[str, Any]

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
    """Returns what is asked: the prompt or the first user message; None for plain text."""
    if is_chat(row):
        return next((message["content"] for message in row["messages"] if message["role"] == "user"), None)
    return row["prompt"] if is_pair(row) else None


def find_row_problem(row: Row) -> str | None:
    """Returns what is wrong with the columns whose meaning is fixed; other columns are the task's affair."""
    for name in ("text", "prompt", "completion"):
        if name in row and not isinstance(row[name], str):
            return f"expected a string in {name!r}, found {row[name]!r}"
    if "completion" in row and "prompt" not in row:
        return "expected 'prompt' beside 'completion'"
    if is_chat(row):
        return _find_message_problem(row["messages"])
    return None


def find_format_problem(row: Row, first: Row) -> str | None:
    """Returns what a row lacks where the first row of its file is text to train on."""
    if has_format(first) and not has_format(row):
        return f"{FORMATS}, found {', '.join(row) or 'nothing'}"
    return None


def _find_message_problem(messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages in 'messages', found {messages!r}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"expected messages of the form {{'role', 'content'}}, found {message!r}"
        if not isinstance(message.get("content"), str):
            return f"expected a string in 'content' of each message, found {message!r}"
    return None
