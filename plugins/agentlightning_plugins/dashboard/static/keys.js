// Keys: j and k move through a list, or from a rollout to its neighbours in the list from which it was opened.
const KEPT = "agl-list";

const LISTED =
  "[data-rows] > article, [data-rows] summary, [data-rows] tbody tr:not(details:not([open]) tr)";
const rows = () => [...document.querySelectorAll(LISTED)];
const current = () => document.querySelector("[data-rows] .current");
const target = (row) => row.querySelector("a[href]");

function remember() {
  const links = rows().map((row) => target(row)?.getAttribute("href")).filter((link) => link?.includes("/rollouts/"));
  if (links.length) {
    sessionStorage.setItem(KEPT, JSON.stringify({ from: location.pathname + location.search, links }));
  }
}

function move(step) {
  const all = rows();
  if (all.length) {
    const place = all.indexOf(current());
    const next = all[Math.min(all.length - 1, Math.max(0, place + step))];
    current()?.classList.remove("current");
    next.classList.add("current");
    (target(next) ?? next).focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    return;
  }
  const { links = [] } = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  const place = links.indexOf(location.pathname);
  if (place >= 0 && links[place + step]) location.href = links[place + step];
}

function up() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  const link = document.querySelector("[data-up]")?.getAttribute("href");
  if (kept.links?.includes(location.pathname)) location.href = kept.from;
  else if (link) location.href = link;
}

export function startKeys() {
  remember();
  document.addEventListener("refreshed", remember);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const search = document.querySelector("[data-search]");
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "u") up();
    else if (event.key === "/" && search) {
      event.preventDefault();
      search.closest("details")?.setAttribute("open", "");
      search.focus();
    }
  });
}
