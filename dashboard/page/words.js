// Numbers and times in words. Times of devices may be wrong, so one in the future is shown as it is.

const DAY = 86400;

/** A duration in one or two units: "3 d 4 h", "12 min", "8 s". */
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds) || seconds < 0) return "unknown";
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < DAY) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / DAY)} d ${Math.floor((s % DAY) / 3600)} h`;
}

/** When something was, relative to `now`, both in seconds since the epoch. */
export function ago(time, now) {
  if (time == null) return "";
  if (time > now + 5) return `${moment(time)} (the device's clock is ahead)`;
  return now - time < 3 ? "now" : `${duration(now - time)} ago`;
}

/** A moment in the reader's own zone. */
export function moment(time) {
  const date = new Date(time * 1000);
  return Number.isNaN(date.getTime()) ? "unknown" : date.toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

/** Seconds as milliseconds or seconds with three digits. */
export function latency(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "-";
  return seconds < 1 ? `${digits(seconds * 1000)} ms` : `${digits(seconds)} s`;
}

/** Three significant digits, without an exponent. */
export function digits(value) {
  if (value == null || !Number.isFinite(value)) return "-";
  if (Math.abs(value) >= 1e6) return `${digits(value / 1e6)} M`;
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Bytes with a unit. */
export function bytes(count) {
  if (count == null || !Number.isFinite(count)) return "-";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${digits(count)} ${units[unit]}`;
}
