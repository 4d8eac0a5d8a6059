"""System messages in the middle of a conversation, for policies whose chat template has no way with them."""

from collections.abc import Sequence

from agentrl.chat.codec import ChatCodec
from agentrl.schemas.trajectory import Message, Role

_WORDS = ("qzab", "qzcd", "qzef")


def takes_system_inside(codec: ChatCodec) -> bool:
    """Whether the template writes a system message where it stands: after what a user says, a second one at the
    beginning, and after the answer of a policy."""
    first, second, inside = _WORDS
    system, other = (Message(role=Role.SYSTEM, content=word) for word in (inside, second))
    user = Message(role=Role.USER, content=first)
    try:
        shown = codec.template.render([user, system], generate=True)
        leading = codec.template.render([other, system, user], generate=True)
        after = codec.template.after_turn([user, system])
    except Exception:  # templates raise what they like, in words of their own
        return False
    in_order = [[first, inside], [second, inside, first], [first, inside]]
    return all(
        text.find(words[0]) > -1 and [text.find(word) for word in words] == sorted(text.find(word) for word in words)
        for text, words in zip((shown, leading, after), in_order, strict=True)
    )


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def with_reminders(messages: Sequence[Message], first: bool) -> list[Message]:
    """Messages of which none is of the system but the first, if ``first`` says that nothing comes before them. Others
    at the beginning join it, and later ones become reminders that a user says, together with what is said before or
    after them."""
    written: list[Message] = []
    after_reminder = False
    for message in messages:
        previous = written[-1] if written else None
        is_system = message.role is Role.SYSTEM
        if is_system and first and all(before.role is Role.SYSTEM for before in written):
            text = "\n\n".join([*(before.content for before in written), message.content])
            written, is_system = [message.model_copy(update={"content": text})], False
        elif previous and previous.role is Role.USER and (is_system or (after_reminder and message.role is Role.USER)):
            added = reminder(message.content) if is_system else message.content
            written[-1] = previous.model_copy(update={"content": f"{previous.content}\n\n{added}"})
        else:
            written.append(Message(role=Role.USER, content=reminder(message.content)) if is_system else message)
        after_reminder = is_system
    return written
