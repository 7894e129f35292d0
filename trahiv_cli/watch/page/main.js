// The page: events come in, are folded into one state, and that is drawn at most four times a second.

import { redraw, showChart } from "./chart.js";
import { kickButton, showDeeds } from "./deeds.js";
import { $ } from "./dom.js";
import { begin, fold } from "./fold.js";
import { Replay } from "./replay.js";
import { sentence } from "./sentence.js";
import * as view from "./view.js";

const DRAW_EVERY_MS = 250;

let state = begin(), coming = begin(); // `coming` while its past is read, so that a reload does not flicker
let about = { deeds: [] }, ahead = 0, isLive = false, lost = null, timer = 0, drawnAt = 0;

async function ask() {
  const answer = await fetch("about").catch(() => null);
  if (!answer?.ok) return; // the stream says so, and tries again
  about = await answer.json();
  ahead = about.now - Date.now() / 1000;
  schedule();
}

await ask();
const replay = about.replay ? new Replay(about.replay[0], schedule) : null;
const now = () => (replay ? replay.time : Date.now() / 1000 + ahead); // by the server's clock

function draw() {
  timer = 0;
  drawnAt = performance.now();
  const shown = replay ? replay.state : state, t = now();
  let said = isLive ? sentence(shown, t) : ["Reading", " what has happened so far.", "idle"];
  if (lost) said = ["Disconnected", `: ${lost}`, "bad"];
  view.showHead(shown, said, about.folder);
  if (!isLive || document.hidden) return;
  showDeeds(shown, lost ? [] : about.deeds);
  view.showProgress(shown, t);
  showChart(shown);
  view.showPeople(shown, t, about.deeds.includes("kick") && !lost ? kickButton : null);
  view.showRounds(shown, t);
  view.showMachine(shown);
  view.showWriting(shown);
  view.showNotices(shown, t);
}

function schedule() {
  timer ||= setTimeout(draw, Math.max(0, DRAW_EVERY_MS - (performance.now() - drawnAt)));
}

const stream = new EventSource("events");
stream.addEventListener("begin", () => {
  coming = begin();
  replay?.clear();
  lost = null;
  ask(); // it may be another server than before
});
stream.addEventListener("live", () => {
  state = coming;
  isLive = true;
  schedule();
});
stream.onmessage = ({ data }) => {
  const events = JSON.parse(data);
  if (replay) replay.add(events);
  else for (const event of events) fold(coming, event);
  schedule();
};
stream.onerror = () => {
  lost = stream.readyState === EventSource.CLOSED
    ? "open the address that `trahiv watch` has printed now."
    : "`trahiv watch` does not run. Started again on the same port, it is found by itself.";
  schedule();
};

setInterval(schedule, 1000);
addEventListener("resize", schedule);
addEventListener("visibilitychange", schedule);
for (const id of ["range", "earlier"]) $(id).addEventListener("change", schedule);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  redraw();
  schedule();
});
schedule();
