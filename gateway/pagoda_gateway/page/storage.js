// Data kept in this browser: conversations and settings until they are cleared, the key until the tab is closed.

const PREFIX = "pagoda.";
const CONVERSATION = `${PREFIX}conversation.`;

function stored(storage) {
  try {
    return window[storage];
  } catch {
    return null; // forbidden by the browser's settings: nothing is kept
  }
}

export const apiKey = {
  get: () => stored("sessionStorage")?.getItem(`${PREFIX}key`) ?? "",
  set(key) {
    if (key) stored("sessionStorage")?.setItem(`${PREFIX}key`, key);
    else stored("sessionStorage")?.removeItem(`${PREFIX}key`);
  },
};

function read(name) {
  try {
    return JSON.parse(stored("localStorage")?.getItem(name) ?? "null");
  } catch {
    return null; // not ours, or truncated: treated as absent
  }
}

/** Store a value; returns whether there was room. */
function write(name, value) {
  try {
    stored("localStorage")?.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = {
  get: () => read(`${PREFIX}settings`) ?? {},
  set: (values) => write(`${PREFIX}settings`, values),
};

export const theme = {
  get: () => stored("localStorage")?.getItem(`${PREFIX}theme`) ?? "auto",
  set: (name) => stored("localStorage")?.setItem(`${PREFIX}theme`, name),
};

const UNKEPT = new Set(["tokens", "busy"]); // large, or transient

export const conversations = {
  /** Newest first. */
  all() {
    const names = Object.keys(stored("localStorage") ?? {}).filter((name) => name.startsWith(CONVERSATION));
    const found = names.map(read).filter((each) => each && typeof each.id === "string" && Array.isArray(each.messages));
    return found.sort((a, b) => b.changed - a.changed);
  },

  save(conversation) {
    const kept = (name, value) => (UNKEPT.has(name) ? undefined : value);
    return write(CONVERSATION + conversation.id, JSON.parse(JSON.stringify(conversation, kept)));
  },

  remove(id) {
    stored("localStorage")?.removeItem(CONVERSATION + id);
  },

  clear() {
    for (const each of this.all()) this.remove(each.id);
  },
};
