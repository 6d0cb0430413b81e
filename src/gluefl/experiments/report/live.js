// Only in a page that `gluefl report --watch` serves: reload when there is something new, and stay at the same place.
"use strict";
function watch(version) {
  history.scrollRestoration = "manual"; // the browser would restore it before the figures have their heights
  const kept = JSON.parse(sessionStorage.getItem("gluefl") || "null");
  sessionStorage.removeItem("gluefl");
  if (kept) {
    window.glueflHide(kept.hidden);
    kept.open.forEach(i => { const one = document.querySelectorAll("details")[i]; if (one) one.open = true; });
    window.scrollTo(0, kept.scroll);
  }
  const look = async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== version) {
        const open = [...document.querySelectorAll("details")].flatMap((one, i) => (one.open ? [i] : []));
        const state = { scroll: window.scrollY, hidden: window.glueflHidden(), open };
        sessionStorage.setItem("gluefl", JSON.stringify(state));
        location.reload();
        return;
      }
      document.querySelector(".live").textContent = "live";
    } catch {
      document.querySelector(".live").textContent = "the program that served this page has ended";
    }
    setTimeout(look, 1500);
  };
  setTimeout(look, 1500);
}
