"""A server of the OpenAI protocol, in a process of its own, that plays the customers of ``service`` from what they are
told: ``python customer_server.py [refuse]`` prints its port. ``refuse`` confirms nothing."""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REFUSES = "refuse" in sys.argv


def reply(messages: list[dict[str, str]]) -> str:
    about, heard = messages[0]["content"], messages[-1]["content"].lower()
    before = [message["content"].lower() for message in messages[:-1] if message["role"] == "user"]
    wishes = re.findall(r"^\d+\. (.*) It is order (A\d+)\.(?: The new address is (.*)\.)?$", about, re.M)
    at = sum("anything else" in text for text in before)
    _, order, address = wishes[at]
    if "anything else" in heard:
        return wishes[at + 1][0] if at + 1 < len(wishes) else "###STOP###"
    if "confirm" in heard:
        return "Yes, please." if order.lower() in heard and not REFUSES else "No, not that."
    if "email" in heard:
        return f"Sure: {re.findall(r'address is (.*)[.]$', about, re.M)[0]}"
    if "which order" in heard:
        return f"That would be {order}."
    return f"To {address}, please." if "address" in heard and address else "Hm?"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = 200, {"error": {"message": "too long", "type": "invalid_request_error"}}
        if request["model"] == "broken":
            status = 400
        else:
            message = {"role": "assistant", "content": reply(request["messages"])}
            body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text := json.dumps(body).encode())))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
