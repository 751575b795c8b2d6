"""The page's own script, run without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources

import pytest

# Elements that take everything, and a server whose answer waits until it is told to go on.
BROWSER = """
const things = {};
function thing() {
  return new Proxy(function () {}, {
    get: (target, name) => name in target.held ? target.held[name] : name === Symbol.toPrimitive ? () => "" :
      name === "children" || name === "then" ? undefined : (target.held[name] = thing()),
    set: (target, name, value) => { target.held[name] = value; return true; },
    apply: () => thing(),
    has: () => true,
  });
}
Object.defineProperty(Function.prototype, "held", {get() { return this.own ??= {}; }});
globalThis.document = {
  getElementById: (id) => things[id] ??= Object.assign(thing(), {value: "", listeners: {},
    addEventListener(name, call) { this.listeners[name] = call; }}),
  createElement: () => thing(), addEventListener() {}, hidden: true,
};
globalThis.sessionStorage = {getItem: () => "", setItem() {}};
globalThis.devicePixelRatio = 1;
const sent = [], waiting = [];
globalThis.fetch = async (path, options) => {
  if (path !== "/v1/chat/completions") throw new TypeError("not here");
  sent.push(JSON.parse(options.body).messages.map((message) => message.content));
  const piece = 'data: {"choices":[{"delta":{"content":"old"}}]}\\n\\n';
  const body = new ReadableStream({async start(controller) {
    controller.enqueue(new TextEncoder().encode(piece));
    options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    waiting.push(() => { controller.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n")); controller.close(); });
  }});
  return {ok: true, body};
};
const turn = () => new Promise((resolve) => setTimeout(resolve, 5));
const say = (text) => { document.getElementById("question").value = text; things.form.listeners.submit(); };
setTimeout(async () => {
  say("one"); await turn(); await turn(); waiting.pop()(); await turn(); await turn();
  say("two"); await turn(); await turn();
  things.fresh.listeners.click(); await turn(); await turn();
  say("three"); await turn(); await turn();
  console.log(JSON.stringify(sent));
  process.exit(0);
}, 5);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_new_conversation_forgets_the_old_one() -> None:
    page = resources.files("edgespec.server").joinpath("page.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    done = subprocess.run(
        ["node", "-e", BROWSER + script], capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["one"], ["one", "old", "two"], ["three"]]
