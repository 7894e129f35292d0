// The state of a run as one sentence: its beginning changes rarely and is spoken, the rest is only shown.

import { ago, clean, clock, count, duration, expected } from "./words.js";

const SILENT_AFTER_S = 180;
const REASONS = new Map([
  ["signal", "it was told to"], ["finish", "its user finished it"], ["budget", "its budget is spent"],
]);

// Returns what is spoken, what follows it, and a word for colours: idle, good, wait, bad or done.
export function sentence(state, now) {
  const { step, maxSteps } = state;
  const at = step == null ? "" : `, step ${count(step)}${maxSteps ? ` of ${count(maxSteps)}` : ""}`;
  const ended = clock(state.since, now);
  switch (state.phase) {
    case "none":
      if (state.trouble) return ["The swarm does not answer", `: ${clean(state.trouble.message, 200)}`, "bad"];
      return ["Waiting", " for the first word of this run.", "idle"];
    case "failed":
      return ["Stopped by an error", `${at}: ${clean(state.why, 300)}`, "bad"];
    case "done":
      return ["Done", `${at}, ${ended}. The model is in ${clean(state.ended.path ?? "the memory of its program", 120)}.`, "done"];
    case "stopped":
      return ["Stopped", `${at}, ${ended}: ${REASONS.get(state.ended.reason) ?? clean(state.ended.reason)}.`, "idle"];
  }
  // What a peer sees of others comes also while it is paused, or its training stands still.
  const heard = state.own && state.phase !== "paused" ? state.ownAt : state.now;
  const patience = Math.max(SILENT_AFTER_S, state.rate ? 6 / state.rate : 0);
  if (now - heard > patience) return ["Silent", `${at}: the last word came ${ago(now - heard)}.`, "bad"];
  if (state.phase === "paused") {
    return ["Paused", `${at}${state.why ? `: ${clean(state.why, 200)}` : ""}, ${ago(now - state.since)}.`, "idle"];
  }
  if (state.waiting) {
    const left = Math.max(0, state.waiting.until_seconds - state.waiting.seconds - (now - state.waiting.t));
    return ["Waiting", ` for ${clean(state.waiting.what, 200)}, at most ${duration(Math.round(left))} more.`, "wait"];
  }
  if (state.phase === "loading") return ["Loading the model", `, ${duration(now - state.since)} so far.`, "wait"];
  const last = state.roundAt ? `; the last round was ${ago(now - state.roundAt)}` : "";
  const end = endOf(state);
  const alone = state.peers === 1 ? "Training alone" : "Training";
  return [alone, `${at}${last}${end ? `; done ${expected(end, now)}` : ""}.`, "good"];
}

export const endOf = (state) =>
  state.rate && state.maxSteps && state.phase === "training"
    ? state.recent.at(-1)[0] + (state.maxSteps - state.step) / state.rate
    : null;
