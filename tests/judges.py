"""A real HTTP server of chat completions for the reward `judge`."""

import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


def last_digit(number, question):
    digits = re.findall(r"\d", question.partition("Answer:\n")[2].partition("\n\nHow good")[0])
    return f"I think so.\nScore: {digits[-1] if digits else 0}/10"


@contextlib.contextmanager
def judge_server(answer=last_digit, seconds=0.0):
    """`answer(number, question)`, after `seconds`: a text, the fields of a choice, a status with
    headers, or None to drop the connection. Yields its url, what it was sent, and the most requests
    at once."""
    server = SimpleNamespace(questions=[], keys=set(), num_now=0, most_at_once=0)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question, key = body["messages"][-1]["content"], self.headers.get("Authorization")
            with lock:
                server.questions.append(question)
                server.keys.add(key)
                server.num_now += 1
                server.most_at_once = max(server.most_at_once, server.num_now)
                number = len(server.questions) - 1
            time.sleep(seconds)
            replied = answer(number, question)
            with lock:
                server.num_now -= 1
            self.close_connection = replied is None
            if replied is None:
                return
            status, headers = replied if isinstance(replied, tuple) else (200, {})
            choice = {"finish_reason": "stop", "message": {"content": replied}}
            if isinstance(replied, dict):
                choice = replied
            choice = {"index": 0, **choice, "message": {"role": "assistant", **choice["message"]}}
            usage = {"total_tokens": 10, **choice.get("usage", {})}
            reply = {"choices": [choice], "usage": usage}
            content = json.dumps(reply if status == 200 else {"error": f"not with {key}"}).encode()
            with contextlib.suppress(OSError):  # the client may have given up
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads, block_on_close, request_queue_size = True, False, 128

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
