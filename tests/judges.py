"""A real HTTP server of chat completions for the reward `judge`."""

import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers with `answer(number, question)`: a text, a status, a status with headers, or None to
    drop the connection. Counts calls and those under way at once."""

    def __init__(self, answer, seconds):
        self.answer, self.seconds = answer, seconds
        self.num_calls = self.num_now = self.most_at_once = 0
        self.spans, self.questions, self.keys = [], [], set()
        self._lock = threading.Lock()

    def serve(self, handler):
        started = time.monotonic()
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self._lock:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            self.num_now += 1
            self.most_at_once = max(self.most_at_once, self.num_now)
            self.questions.append(question)
            self.keys.add(handler.headers.get("Authorization"))
        time.sleep(self.seconds)
        answer = self.answer(number, question)
        with self._lock:
            self.num_now -= 1
            self.spans.append((started, time.monotonic()))
        if answer is None:
            handler.close_connection = True
            return
        status, headers = 200, {}
        if not isinstance(answer, str):
            status, headers = answer if isinstance(answer, tuple) else (answer, {})
        reply = {"error": f"refused {handler.headers.get('Authorization')}"}
        if status == 200:
            message = {"role": "assistant", "content": answer}
            reply = {"choices": [{"message": message}], "usage": {"total_tokens": 10}}
        content = json.dumps(reply).encode()
        with contextlib.suppress(OSError):  # the client may have given up
            handler.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(content)


def last_digit(number, question):
    """The score of a completion is its last digit."""
    digits = re.findall(r"\d", question.partition("Answer:\n")[2].partition("\n\nHow good")[0])
    return f"I think so.\nScore: {digits[-1] if digits else 0}/10"


@contextlib.contextmanager
def judge_server(answer=last_digit, seconds=0.0):
    server = Server(answer, seconds)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            server.serve(self)

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
