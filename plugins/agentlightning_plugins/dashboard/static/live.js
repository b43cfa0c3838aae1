// Fetches the page again when its run has changed, and replaces the parts that are marked as live.

// Copies the state of the shown part to the fresh part: open details, and the selected row.
function keepState(part, next) {
  for (const shown of part.querySelectorAll("details[open][id]")) {
    next.querySelector(`#${CSS.escape(shown.id)}`)?.setAttribute("open", "");
  }
  const link = part.querySelector(".current a[href]")?.getAttribute("href");
  if (link) next.querySelector(`a[href="${CSS.escape(link)}"]`)?.closest("tr, article")?.classList.add("current");
}

async function refresh() {
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok || response.redirected) return;
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    if (!next || part.contains(document.activeElement)) continue;
    keepState(part, next);
    if (next.innerHTML !== part.innerHTML) part.replaceWith(next);
  }
  document.dispatchEvent(new Event("refreshed"));
}

export function startLive() {
  const run = document.body.dataset.liveRun;
  if (!run || !document.querySelector("[data-live]")) return;
  const sign = document.getElementById("live");
  let source = null;
  const open = () => {
    source = new EventSource(`/live/${run}`);
    source.addEventListener("open", () => sign.removeAttribute("hidden"));
    source.addEventListener("error", () => sign.setAttribute("hidden", ""));
    source.addEventListener("changed", () => refresh().catch(() => sign.setAttribute("hidden", "")));
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      refresh().catch(() => {});
      open();
    }
  });
  window.addEventListener("pagehide", () => source?.close());
  if (!document.hidden) open();
}
