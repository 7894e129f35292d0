// What the page can ask for: only what its server offers, and what cannot be undone only after a question.

import { $, el, put } from "./dom.js";
import { nameOf } from "./fold.js";

const NAMES = { pause: "Pause", resume: "Resume", finish: "Finish…", invite: "Invite…" };

export async function perform(deed, what = {}) {
  try {
    const answer = await fetch(`do/${deed}`, { method: "POST", body: JSON.stringify(what) });
    return { isDone: answer.ok, ...(await answer.json()) };
  } catch {
    return { isDone: false, message: "The server of this page does not answer.", hint: "" };
  }
}

const words = ({ message, hint }) => [message, hint].filter(Boolean).join(" ");

function ask({ title, text, action, deed, what = () => ({}), hasChoices = false }) {
  put($("dialog-title"), title);
  put($("dialog-text"), text);
  put($("dialog-do"), action);
  put($("dialog-close"), "Cancel");
  put($("dialog-answer"), "");
  $("dialog-choices").hidden = !hasChoices;
  $("dialog-line").hidden = true;
  $("dialog-do").hidden = false;
  $("dialog-do").onclick = async (click) => {
    click.preventDefault();
    if (!$("dialog-line").hidden) {
      $("dialog-line").select();
      const isCopied = await navigator.clipboard.writeText($("dialog-line").value).then(() => true, () => false);
      put($("dialog-answer"), isCopied ? "It is in the clipboard." : "Copy it by hand: it is selected.");
      return;
    }
    $("dialog-do").disabled = true;
    put($("dialog-answer"), "One moment…");
    const answer = await perform(deed, what());
    $("dialog-do").disabled = false;
    put($("dialog-answer"), words(answer) || "Done.");
    if (!answer.isDone) return;
    put($("dialog-close"), "Close");
    $("dialog-do").hidden = !answer.line;
    $("dialog-choices").hidden = true;
    $("dialog-line").hidden = !answer.line;
    $("dialog-line").value = answer.line ?? "";
    put($("dialog-do"), "Copy");
    $("dialog-close").focus();
  };
  $("dialog").showModal();
}

$("dialog-close").onclick = () => $("dialog").close();
$("role").onchange = () => {
  const isWatcher = $("role").value === "watch"; // who watches leaves no trace, so only time ends that
  $("once").disabled = isWatcher;
  $("hours").options[0].disabled = isWatcher;
  if (isWatcher) $("once").checked = false;
  if (isWatcher && !$("hours").value) $("hours").value = "24";
};

const QUESTIONS = {
  finish: {
    title: "Finish this run here?", deed: "finish", action: "Finish",
    text: "This peer leaves at the next round, with a checkpoint. The others go on; the same command resumes.",
  },
  invite: {
    title: "Invite somebody", deed: "invite", action: "Make a line", hasChoices: true,
    text: "The line that you get lets others in. It holds a secret: treat it like a password.",
    what: () => {
      const hours = Number($("hours").value) || null;
      return { watch: $("role").value === "watch", once: $("once").checked, hours };
    },
  },
};

let phase = "", answeredIn = ""; // of the run: now, and when the last answer came

async function act(deed) {
  if (QUESTIONS[deed]) return ask(QUESTIONS[deed]);
  const button = $(`do-${deed}`);
  button.disabled = true;
  const answer = await perform(deed);
  button.disabled = false;
  put($("answer"), words(answer));
  $("answer").hidden = false;
  answeredIn = phase;
}

export function showDeeds(state, offered) {
  const isRunning = ["training", "loading", "paused"].includes(state.phase);
  const isPaused = state.phase === "paused";
  phase = state.phase;
  if (phase !== answeredIn) $("answer").hidden = true; // it has happened
  const wanted = { pause: isRunning && !isPaused, resume: isPaused, finish: isRunning, invite: true };
  for (const [deed, name] of Object.entries(NAMES)) {
    let button = $(`do-${deed}`);
    if (!button && offered.includes(deed)) {
      button = Object.assign(el("button", "", name), { id: `do-${deed}`, type: "button", onclick: () => act(deed) });
      $("deeds").append(button);
    }
    if (button) button.hidden = !wanted[deed] || !offered.includes(deed);
  }
}

export function kickButton(one) {
  const button = Object.assign(el("button", "small", "Remove…"), { type: "button" });
  button.ariaLabel = `Remove ${nameOf(one)}`;
  button.onclick = () => ask({
    title: `Remove ${nameOf(one)}?`, deed: "kick", action: "Remove", what: () => ({ peer: one.peer_id }),
    text: "It trains along no longer, and the invitation that it came by is closed for all.",
  });
  return button;
}
