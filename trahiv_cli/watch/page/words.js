// Numbers, times and strangers' texts, in words.

const LOCALE = "en-GB";
// What steers a terminal or the direction of writing, or is not seen.
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const MOMENT = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" };
const MINUTE = 60, HOUR = 3600, DAY = 86400;

export const count = (number) => Math.round(number ?? 0).toLocaleString(LOCALE);

export function decimal(number, digits) {
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return number == null ? "–" : number.toLocaleString(LOCALE, options);
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${decimal(number, unit ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 10) return `${decimal(Math.max(0, seconds), 1)} s`;
  if (seconds < 2 * MINUTE) return `${Math.round(seconds)} s`;
  if (seconds < 2 * HOUR) return `${Math.round(seconds / MINUTE)} min`;
  const [large, small, one, other] = seconds < 2 * DAY ? [HOUR, MINUTE, "h", "min"] : [DAY, HOUR, "days", "h"];
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${one}${rest ? ` ${rest} ${other}` : ""}`;
}

export const ago = (seconds) => `${duration(Math.max(0, Math.round(seconds))).replace(/\.0 s$/, " s")} ago`;

const time = (date) => date.toLocaleTimeString(LOCALE, { hour: "2-digit", minute: "2-digit" });

const noon = (date) => new Date(date).setHours(12, 0, 0, 0);
const daysBetween = (now, then) => Math.round((noon(then) - noon(now)) / (DAY * 1000));

// "16:02", and with a day if that is not today.
export function clock(t, now) {
  const date = new Date(t * 1000), days = daysBetween(now * 1000, date);
  const options = Math.abs(days) < 7 ? { weekday: "short" } : { day: "numeric", month: "short" };
  return days ? `${date.toLocaleDateString(LOCALE, options)} ${time(date)}` : time(date);
}

// "14 Mar 16:02:07"
export const moment = (t) => new Date(t * 1000).toLocaleString(LOCALE, MOMENT).replace(",", "");

// "on Tuesday about 16:00": the further away, the rounder, so that it rarely changes.
export function expected(t, now) {
  const left = t - now;
  if (left < 90) return "in about a minute";
  const grain = left < HOUR ? MINUTE : left < 6 * HOUR ? 5 * MINUTE : left < 2 * DAY ? HOUR / 2 : HOUR;
  const date = new Date(Math.round(t / grain) * grain * 1000), days = daysBetween(now * 1000, date);
  const named = (options) => `on ${date.toLocaleDateString(LOCALE, options)}`;
  if (days > 300) return named({ day: "numeric", month: "long", year: "numeric" });
  if (days > 6) return named({ day: "numeric", month: "long" });
  return `${["today", "tomorrow"][days] ?? named({ weekday: "long" })} about ${time(date)}`;
}

// A stranger's text, cut, with nothing in it that steers how others are shown.
export function clean(text, length = 80) {
  const start = Array.from(String(text ?? "").slice(0, 2 * length + 2)); // characters, not halves of them
  const cut = start.length > length ? `${start.slice(0, length - 1).join("")}…` : start.join("");
  return cut.replace(STEERING, "�");
}

export const shortId = (id) => `…${clean(String(id).slice(-6))}`;
