// A recording, played back: the events up to a time, which runs or is set by hand.

import { $, put } from "./dom.js";
import { begin, fold } from "./fold.js";
import { moment } from "./words.js";

const TICK_MS = 250;

export class Replay {
  // `main` is the folder whose peer the page is about.
  constructor(main, onChange) {
    Object.assign(this, { main, onChange, time: 0, isPlaying: false });
    this.clear();
    $("replay").hidden = false;
    $("time").oninput = () => this.go(Number($("time").value));
    $("play").onclick = () => this.play(!this.isPlaying);
    setInterval(() => this.isPlaying && this.go(this.time + (TICK_MS / 1000) * Number($("pace").value)), TICK_MS);
  }

  // The server is there again, and sends all events anew.
  clear() {
    Object.assign(this, { events: [], folded: 0, state: begin(this.main) });
  }

  // Events come in the order of their times; the end is shown until somebody moves the slider.
  add(events) {
    const isAtEnd = this.folded === this.events.length;
    for (const event of events) this.events.push(event);
    $("time").min = this.events[0].t;
    $("time").max = this.events.at(-1).t;
    if (isAtEnd) this.go(this.events.at(-1).t);
  }

  play(isPlaying) {
    const [first, last] = [this.events[0]?.t ?? 0, this.events.at(-1)?.t ?? 0];
    this.isPlaying = isPlaying;
    if (isPlaying && this.time >= last) this.go(first);
    put($("play"), this.isPlaying ? "Stop" : "Play");
  }

  go(time) {
    const last = this.events.at(-1)?.t ?? 0;
    if (time < this.time) Object.assign(this, { state: begin(this.main), folded: 0 });
    this.time = Math.min(time, last);
    while (this.events[this.folded]?.t <= this.time) fold(this.state, this.events[this.folded++]);
    $("time").value = this.time;
    put($("time-said"), moment(this.time));
    $("time").ariaValueText = $("time-said").textContent;
    if (this.isPlaying && this.time >= last) this.play(false);
    this.onChange();
  }
}
