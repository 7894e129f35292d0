// What a run's events say, folded into one state. It knows no clock and no page: it is the same for the same events.

import { clean, shortId } from "./words.js";

const ROUNDS_KEPT = 50, NOTICES_KEPT = 40, MARKS_KEPT = 300, SAMPLES_KEPT = 100, PEOPLE_KEPT = 300;
const RATE_OVER = 30; // steps
const AWAY_AFTER = 20; // steps without this peer, where nothing else is known of it
const FORGOTTEN_AFTER_S = 3600;

// Times are Unix seconds. Of several peers' events, `main` says of which folder this peer's are.
export const begin = (main = null) => ({
  phase: "none", since: 0, why: "", waiting: null, ended: null, now: 0, ownAt: 0,
  run: null, own: null, main, others: new Map(), people: new Map(), seenPeers: false, trouble: null,
  step: null, maxSteps: null, peers: null, speed: null, rate: null, recent: [], roundAt: 0, lastStepAt: 0,
  curve: "loss", points: { step: [], value: [], held: [] }, marks: [], rounds: [], samples: [], notices: [], next: 0,
  mine: 0, all: 0, sent: 0, received: 0, blocked: 0, trained: 0, data: null, heldOut: null,
});

export function fold(state, event) {
  const isOwn = (event.of ?? null) === state.main;
  state.now = Math.max(state.now, event.t);
  if (event.event !== "peers") state.ownAt = state.now;
  const handler = (isOwn ? OWN : OTHERS).get(event.event);
  try {
    handler?.(state, event);
  } catch (error) {
    console.warn("an event that cannot be understood", event, error); // the page goes on with the others
  }
}

const OWN = new Map(Object.entries({
  ready(state, e) {
    Object.assign(state, { run: e.run_id, own: e.peer_id, maxSteps: e.max_steps ?? null, ended: null, waiting: null });
    enter(state, "loading", e);
    Object.assign(person(state, e.peer_id), { reached: e.reached, isAway: false }, e.of && { name: e.of });
  },
  joined(state, e) {
    enter(state, "training", e);
    if (state.lastStepAt) mark(state, "back", e, `this peer is back: step ${e.step}`);
    Object.assign(state, { waiting: null, step: e.step, peers: e.peers, recent: [], rate: null, lastStepAt: e.t });
    note(state, "note", e, e.why);
  },
  step(state, e) {
    if (state.phase !== "paused") enter(state, "training", e);
    if (e.reward != null) state.curve = "reward";
    point(state, e.step, e[state.curve] ?? null, null);
    if (state.peers !== null && e.peers !== state.peers) {
      mark(state, e.peers > state.peers ? "join" : "leave", e, `${e.peers} peers, before that ${state.peers}`);
    }
    if (state.lastStepAt) state.trained += e.t - state.lastStepAt;
    state.waiting = null;
    state.speed = e.samples_per_second;
    state.mine += e.my_samples ?? 0;
    state.all += e.samples ?? 0;
    Object.assign(state, { step: e.step, peers: e.peers, lastStepAt: e.t, data: e.data ?? state.data });
    clocked(state, e.t, e.step);
    const given = e.round?.samples ?? (state.own ? { [state.own]: e.my_samples ?? 0 } : {});
    for (const [id, samples] of Object.entries(given)) {
      const one = person(state, id);
      const gave = { samples: one.samples + samples, step: e.step, at: e.t, since: one.since || e.t, isAway: false };
      if (!one.isTold) Object.assign(one, gave);
    }
    const own = { speed: e.samples_per_second, step: e.step, at: e.t, isAway: false };
    if (state.own) Object.assign(person(state, state.own), own);
    if (e.round) round(state, e, e.round);
  },
  eval(state, e) {
    const held = e.eval_reward ?? e.eval_loss;
    if (held == null) return;
    state.heldOut = { t: e.t, value: held };
    point(state, e.step, null, held);
  },
  checkpoint: (state, e) => mark(state, "save", e, "checkpoint"),
  pace(state, e) {
    mark(state, "pace", e, e.message);
    note(state, "note", e, e.message);
  },
  reach(state, e) {
    if (state.own) person(state, state.own).reached = e.reached;
    note(state, "note", e, `Others reach this peer in another way now (${e.reached}). ${e.reached_why}`);
  },
  sample(state, e) {
    state.samples.push(e);
    if (state.samples.length > SAMPLES_KEPT) state.samples.splice(1, 1); // the first stays
  },
  folder: (state, e) => note(state, "note", e, e.message),
  waiting: (state, e) => (state.waiting = e),
  paused(state, e) {
    if (e.peer_id) Object.assign(state, { run: e.run_id, own: e.peer_id });
    enter(state, "paused", e);
    state.why = e.why ?? "";
  },
  resumed: (state, e) => enter(state, "loading", e),
  warning: warn,
  error(state, e) {
    enter(state, "failed", e);
    state.why = e.message;
    note(state, "error", e, e.message, e.hint);
  },
  done(state, e) {
    enter(state, e.reason === "max_steps" ? "done" : "stopped", e);
    Object.assign(state, { ended: e, waiting: null, step: e.step ?? state.step });
  },
  peers(state, e) {
    state.trouble = e.trouble ? { message: e.trouble, hint: e.hint } : null;
    if (!e.trouble) told(state, e);
  },
}));

// Of other peers in a recording: who they are, what they gave, and what they had to say.
const OTHERS = new Map(Object.entries({
  ready(state, e) {
    state.others.set(e.of, e.peer_id);
    other(state, e, { name: e.of, reached: e.reached, isAway: false, at: e.t });
  },
  step: (state, e) => other(state, e, { speed: e.samples_per_second, step: e.step, at: e.t }),
  reach: (state, e) => other(state, e, { reached: e.reached }),
  paused(state, e) {
    other(state, e, { state: "paused" });
    note(state, "note", e, `It is paused: ${e.why}.`);
  },
  resumed: (state, e) => other(state, e, { state: "loading" }),
  joined: (state, e) => other(state, e, { state: "training", isAway: false }),
  warning: warn,
  error: (state, e) => note(state, "error", e, e.message, e.hint),
  done(state, e) {
    other(state, e, { isAway: true });
    note(state, "note", e, `It ended at step ${e.step} (${e.reason}).`);
  },
}));

function other(state, e, what) {
  if (state.others.has(e.of)) Object.assign(person(state, state.others.get(e.of)), what);
}

function enter(state, phase, e) {
  if (state.phase !== phase) Object.assign(state, { phase, since: e.t, recent: [], rate: null });
}

// What all peers say of themselves: alone all there is, or beside this peer's own events.
function told(state, e) {
  state.run ??= e.run_id;
  const peers = e.peers.filter((one) => one.run_id === undefined || one.run_id === state.run);
  const awake = peers.filter((one) => one.state !== "paused"), moving = awake.length ? awake : peers;
  const middle = (name) => moving.map((one) => one[name]).sort((a, b) => a - b)[(moving.length - 1) >> 1] ?? 0;
  const ahead = e.t - (e.now ?? e.t); // of the swarm's time, by which the peers say when something was
  const present = new Set(peers.map((one) => one.peer_id));
  for (const one of peers) {
    const known = person(state, one.peer_id);
    if (state.seenPeers && known.isAway && !state.own) mark(state, "join", e, `${nameOf(known)} is there`);
    const here = { speed: one.samples_per_second, memory: one.memory_gib, heard: (one.at ?? e.now ?? e.t) + ahead, at: e.t };
    Object.assign(known, one, here, { isTold: true, isAway: false });
  }
  for (const one of state.people.values()) {
    if (one.isTold && !one.isAway && !present.has(one.peer_id)) {
      one.isAway = true;
      if (!state.own) mark(state, "leave", e, `${nameOf(one)} is gone`);
    }
    if (one.isAway && e.t - one.at > FORGOTTEN_AFTER_S) state.people.delete(one.peer_id);
  }
  state.seenPeers = true;
  const roundAt = middle("round_at"); // one of them may say anything
  if (roundAt) state.roundAt = Math.max(state.roundAt, roundAt + ahead);
  state.maxSteps ??= middle("max_steps") || null;
  if (state.own || state.lastStepAt) return; // its own events say the rest
  const states = new Set(peers.map((one) => one.state));
  enter(state, ["training", "loading", "paused"].find((one) => states.has(one)) ?? "none", e);
  const step = middle("step");
  if (moving.some((one) => one.reward != null)) state.curve = "reward";
  const values = moving.map((one) => one[state.curve]).filter((value) => value != null).sort((a, b) => a - b);
  if (step !== state.step) clocked(state, e.t, step);
  if (values.length) point(state, step, values[(values.length - 1) >> 1], null);
  Object.assign(state, { step, peers: peers.length });
  state.speed = moving.reduce((sum, one) => sum + one.samples_per_second, 0);
}

function person(state, id) {
  if (!state.people.has(id)) {
    const oldest = state.people.size >= PEOPLE_KEPT ? [...state.people.keys()].find((one) => one !== state.own) : null;
    state.people.delete(oldest);
    state.people.set(id, { peer_id: id, name: "", samples: 0, step: 0, at: 0, since: 0, isAway: true, isTold: false });
  }
  return state.people.get(id);
}

export const nameOf = (one) => (one.name ? clean(one.name, 40) : shortId(one.peer_id));

// Those to show, in an order that does not change: this peer, then the others as they came.
export function peopleOf(state) {
  const isHere = (one) => one.isTold || one.peer_id === state.own || state.step - one.step <= AWAY_AFTER;
  const all = [...state.people.values()].filter(isHere);
  return [...all.filter((one) => one.peer_id === state.own), ...all.filter((one) => one.peer_id !== state.own)];
}

function round(state, e, one) {
  state.sent += one.bytes_sent;
  state.received += one.bytes_received;
  state.blocked += one.blocked_seconds;
  if (one.committed) state.roundAt = e.t;
  const leftOut = Object.entries(one.left_out ?? {}).map(([id, why]) => `without ${nameOf(person(state, id))}: ${why}`);
  const reason = [one.reason, ...leftOut].filter(Boolean).join("; ");
  keep(state.rounds, { ...one, key: state.next++, t: e.t, step: e.step, size: one.group.length, reason }, ROUNDS_KEPT);
}

function warn(state, e) {
  if (e.code === "round" && (e.of ?? null) === state.main) {
    const failed = { key: state.next++, t: e.t, step: (state.step ?? 0) + 1, committed: false, reason: e.message };
    keep(state.rounds, failed, ROUNDS_KEPT);
  }
  note(state, "warning", e, e.message, e.hint);
}

function point(state, step, value, held) {
  const { points } = state, lists = [points.step, points.value, points.held];
  while (held === null && points.step.at(-1) >= step) lists.forEach((list) => list.pop()); // it began again
  if (points.step.at(-1) === step) points.held[points.held.length - 1] = held;
  else if (!(points.step.at(-1) > step)) lists.forEach((list, i) => list.push([step, value, held][i]));
}

function clocked(state, t, step) {
  keep(state.recent, [t, step], RATE_OVER);
  const [began, first] = state.recent[0];
  state.rate = step > first && t > began ? (step - first) / (t - began) : null;
}

const mark = (state, kind, e, text) => keep(state.marks, { kind, step: e.step ?? state.step ?? 0, text }, MARKS_KEPT);

function note(state, kind, e, message, hint = "") {
  if (!message) return;
  const last = state.notices.findLast((one) => one.message === message && one.of === e.of);
  if (last) Object.assign(last, { t: e.t, times: last.times + 1 });
  else keep(state.notices, { key: state.next++, kind, t: e.t, message, hint, of: e.of, times: 1 }, NOTICES_KEPT);
}

function keep(list, item, most) {
  list.push(item);
  if (list.length > most) list.shift();
}
