// The gateway's HTTP API: JSON, and chats as server-sent events.

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refused(response) {
  const said = await response.json().catch(() => null);
  return new ApiError(said?.error?.message ?? `status ${response.status}`, response.status, said?.error?.code);
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

// Yield the chunks of a chat as they arrive.
export async function* chat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refused(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code);
    yield chunk;
  }
  throw new ApiError("the stream broke off", 0, "broken");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const line = block.split("\n").find((one) => one.startsWith("data: "));
        if (line) yield line.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
