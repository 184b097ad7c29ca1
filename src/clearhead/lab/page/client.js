// Requests jobs from the server; the page's URL contains the token.

// Request a job by name. Resolves to its result, or rejects with the server's error line. ``progress(done, text)`` is
// called with its progress, and aborting ``signal`` cancels the job.
export async function ask(name, params = {}, {progress, signal} = {}) {
  let answer;
  try {
    answer = await fetch(`works/${name}`, {
      method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(params), signal,
    });
  } catch (failure) {
    if (signal?.aborted) throw failure;
    throw new Error("The lab does not answer: it has stopped, or its machine is asleep. Start it again.");
  }
  if (!answer.headers.get("content-type")?.startsWith("application/x-ndjson")) {
    throw new Error("busy: the lab has too many connections. Try again soon.");
  }
  for await (const line of linesOf(answer)) {
    if ("error" in line) throw new Error(line.error);
    if ("result" in line) return line.result;
    progress?.(line.progress, line.text);
  }
  throw new Error("The lab stopped before it answered. Start it again.");
}

async function* linesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const {done, value} = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines) if (line.trim() !== "") yield JSON.parse(line);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
