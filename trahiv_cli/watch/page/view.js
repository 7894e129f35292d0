// The state, drawn: each function brings one part of the page up to date.

import { $, el, keep, keepRows, put } from "./dom.js";
import { nameOf, peopleOf } from "./fold.js";
import { endOf } from "./sentence.js";
import { bytes, clean, clock, count, decimal, duration, percent } from "./words.js";

const REACHED = new Map([
  ["direct", "others dial it"], ["punched", "through both routers"], ["relayed", "through a member"],
  ["dials-out", "it dials others"], ["alone", "no peer has tried"],
]);
const SILENT_AFTER_S = 100; // of a hundred peers each is looked at every 75 s
const COLORS = { idle: "#8a8f98", good: "#0f8a7e", wait: "#c27c0e", bad: "#c8372d", done: "#0f8a7e" };

export function showHead(state, [said, rest, mood], folder) {
  put($("said"), said);
  put($("rest"), rest);
  const run = clean(state.run ?? folder ?? "trahiv", 60);
  put($("run"), run);
  const how = state.step == null ? "" : `${count(state.step)}${state.maxSteps ? `/${count(state.maxSteps)}` : ""} · `;
  put(document.querySelector("title"), `${how}${said} · ${run}`);
  if (document.body.dataset.mood !== mood || $("icon").href === "data:,") {
    document.body.dataset.mood = mood;
    const inner = mood === "done" ? `<path d="M9 16.5l5 5 9-11" fill="none" stroke="#fff" stroke-width="3.5"/>` : "";
    const circle = `<circle cx="16" cy="16" r="14" fill="${COLORS[mood]}"/>`;
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">${circle}${inner}</svg>`;
    $("icon").href = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  }
}

// Pairs of a name and a value, and below it a remark.
function figures(list, entries) {
  const items = entries.filter(Boolean).map(([key, value, remark]) => ({ key, value, remark: remark || "" }));
  keep(list, items, ({ key }) => el("div", "", el("dt", "", key), el("dd"), el("dd", "remark")), (node, item) => {
    put(node.children[1], item.value);
    put(node.children[2], item.remark);
  });
}

export function showProgress(state, now) {
  const { step, maxSteps, data } = state, end = endOf(state), part = Math.min(1, (step ?? 0) / maxSteps);
  const there = peopleOf(state).filter((one) => !one.isAway);
  $("bar").max = maxSteps || 1;
  $("bar").value = maxSteps ? Math.min(step ?? 0, maxSteps) : 0;
  const value = state.points.value.findLast((one) => one != null);
  const isKnown = there.length > 0 && there.every((one) => one.speed != null); // of all of them
  const speed = isKnown ? there.reduce((sum, one) => sum + one.speed, 0) : state.speed;
  figures($("figures"), [
    ["Step", step == null ? "–" : count(step), maxSteps && `of ${count(maxSteps)}, ${percent(part)}`],
    ["Time left", end ? duration(end - now) : "–", state.rate && `a step takes ${duration(1 / state.rate)}`],
    ["Peers", state.peers == null ? "–" : count(state.peers), state.own && "with this one"],
    ["Speed", speed == null ? "–" : decimal(speed, 1), "samples a second"],
    [state.curve === "reward" ? "Reward" : "Loss", decimal(value, 3), state.heldOut && `held-out ${decimal(state.heldOut.value, 3)}`],
    // Of a few samples, peers may be in several passes at once.
    data && ["Data", percent(Math.min(1, (data.covered ?? 0) / (data.samples ?? data.shards ?? data.prompts ?? 1))), `of pass ${(data.passes ?? 0) + 1}`],
  ]);
}

function tagOf(one, now) {
  if (one.isAway) return `gone since ${clock(one.heard ?? one.at, now)}`;
  if (one.heard && now - one.heard > SILENT_AFTER_S) return `silent for ${duration(now - one.heard)}`;
  return ["paused", "loading"].includes(one.state) ? one.state : clean(one.trouble || one.waits_for, 60);
}

export function showPeople(state, now, kick) {
  const { message, hint } = state.trouble ?? {};
  put($("trouble"), `The swarm cannot be looked at now: ${clean(message, 300)} ${clean(hint, 200)}`);
  $("trouble").hidden = !state.trouble;
  const people = peopleOf(state);
  $("no-people").hidden = people.length > 0;
  $("people-shown").hidden = !people.length;
  const all = people.reduce((sum, one) => sum + one.samples, 0) || 1;
  const classes = ["name", "more", "more", "number more", "number more", "number more", "number more", "kick"];
  const texts = (one) => {
    const device = [clean(one.device, 40), one.memory && `${decimal(one.memory, 0)} GiB`].filter(Boolean).join(", ");
    return [
      device || "–", REACHED.get(one.reached) ?? "–", count(one.step), decimal(one.isAway ? null : one.speed, 1),
      `${count(one.samples)} · ${percent(one.samples / all)}`, one.since ? clock(one.since, now) : "–",
    ];
  };
  keepRows($("people"), people.map((one) => ({ key: one.peer_id, one })), classes, () => [], (row, { one }) => {
    const [name, ...cells] = row.cells, said = texts(one);
    if (!name.firstChild) name.append(el("bdi"), el("span", "tag"), el("span", "sub"));
    put(name.children[0], nameOf(one));
    name.title = clean(one.peer_id, 80);
    put(name.children[1], one.peer_id === state.own ? "this machine" : tagOf(one, now));
    const [own, reached, , speed, gave] = said, known = [one.device && own, one.reached && reached];
    const sub = [...known, `${speed} samples/s`, `gave ${gave}`].filter(Boolean).join(" · ");
    put(name.children[2], sub); // shown where there is no room for the other columns
    said.forEach((text, i) => put(cells[i], text));
    row.classList.toggle("away", one.isAway);
    if (kick && one.peer_id !== state.own && !cells[6].firstChild) cells[6].append(kick(one));
    else if (!kick) cells[6].replaceChildren();
  });
}

export function showRounds(state, now) {
  $("no-rounds").hidden = state.rounds.length > 0;
  $("rounds-shown").hidden = !state.rounds.length;
  const classes = ["", "number", "number", "number", "number more", "reason"];
  const time = (seconds) => (seconds == null ? "–" : duration(seconds));
  const texts = (one) => [
    clock(one.t, now), count(one.step), one.size ? count(one.size) : "–",
    time(one.seconds), time(one.blocked_seconds),
    one.committed ? clean(one.reason, 300) || "counted" : `failed: ${clean(one.reason, 300)}`,
  ];
  const update = (row, one) => row.classList.toggle("failed", !one.committed);
  keepRows($("rounds"), state.rounds.toReversed(), classes, texts, update);
}

export function showMachine(state) {
  const own = state.people.get(state.own);
  $("machine").hidden = !state.own;
  if (!state.own) return;
  const waited = state.trained ? state.blocked / state.trained : 0;
  figures($("pays"), [
    own?.device && ["Device", clean(own.device, 40), own.memory && `${decimal(own.memory, 0)} GiB`],
    ["Speed", state.speed == null ? "–" : `${decimal(state.speed, 1)} samples/s`],
    ["Samples given", count(state.mine), state.all && `${percent(state.mine / state.all)} of the swarm's`],
    own?.tokens && ["Tokens given", count(own.tokens)],
    ["Sent", bytes(state.sent)],
    ["Received", bytes(state.received)],
    ["Waited for rounds", duration(state.blocked), waited && `${percent(waited)} of the time`],
  ]);
}

export function showWriting(state) {
  const { samples } = state, now = samples.at(-1);
  $("writes").hidden = !now;
  if (!now) return;
  const earlier = samples.slice(0, -1).map((one) => ({ key: one.step, one }));
  const unique = [...new Map(earlier.map((item) => [item.key, item])).values()].filter((item) => item.key !== now.step);
  const option = ({ key }) => Object.assign(el("option", "", `step ${count(key)}`), { value: key });
  keep($("earlier"), unique, option, () => {});
  $("earlier").parentElement.hidden = unique.length < 2;
  const then = unique.find((item) => String(item.key) === $("earlier").value)?.one;
  put($("prompt"), now.prompt ? clean(now.prompt, 500) : "nothing");
  for (const [name, one] of [["then", then], ["now", now]]) {
    $(name).closest("figure").hidden = !one;
    if (!one) continue;
    put($(`${name}-step`), name === "now" ? `now, at step ${count(one.step)}` : `at step ${count(one.step)}`);
    put($(name), clean(one.text, 2000));
  }
}

export function showNotices(state, now) {
  $("no-notices").hidden = state.notices.length > 0;
  $("notices-shown").hidden = !state.notices.length;
  const make = (one) => el("li", one.kind, el("span", "when"), el("bdi", "message"), el("bdi", "hint"));
  const sorted = state.notices.toReversed().sort((a, b) => b.t - a.t);
  keep($("notices"), sorted, make, (node, one) => {
    const when = [clock(one.t, now), one.of && clean(one.of, 30), one.times > 1 && `${count(one.times)} times`];
    put(node.children[0], when.filter(Boolean).join(" · "));
    put(node.children[1], clean(one.message, 600));
    put(node.children[2], clean(one.hint, 400));
  });
}
