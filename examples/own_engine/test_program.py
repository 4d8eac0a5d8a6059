import asyncio

from my_engines.program import Program

from agentrl.engines.base import Sampling
from agentrl.schemas.trajectory import Message, Role


def test_it_asks_for_the_innermost_relation_first_and_answers_with_what_it_found() -> None:
    engine = Program(type="mine", hasty=0).build(None)
    session = engine.open()
    session.messages.append(Message(role=Role.USER, content="city of the boss of Ann?"))
    messages = []
    for answer in ("Bob", "Rome", ""):
        turn = asyncio.run(engine.turn(session, Sampling(), stop=[], seed=0))
        assert turn.message is not None
        messages.append(turn.message)
        session.messages += [turn.message, Message(role=Role.TOOL, content=answer)]
    assert [call.arguments for message in messages for call in message.tool_calls] == [
        '{"who": "Ann", "rel": "boss"}',
        '{"who": "Bob", "rel": "city"}',
    ]
    assert messages[-1].content == "Rome"
