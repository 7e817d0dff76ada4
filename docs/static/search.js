// Search results quote the text of a page, formulas as they are written: show an ellipsis instead.
new MutationObserver(() => document.querySelectorAll("#search-results p.context").forEach(p => {
  const shown = p.innerHTML.replace(/^(?:(?!\\\()[^])*?\\\)/, "…").replace(/\\\([^]*?(\\\)|$)|\\\[[^]*?(\\\]|$)/g, "…");
  if (shown !== p.innerHTML) p.innerHTML = shown;
})).observe(document.documentElement, {childList: true, subtree: true});
