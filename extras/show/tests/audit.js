// What axe-core (https://dequeuniversity.com/rules/axe) would ask of docs/lab.html, as far as the page
// has such things. extras/show/tests/test_lab.py runs this file in the page, whose functions it uses: all, $, sum.
const ROLES = new Set(["img", "application", "status", "alert", "region"]);
const INTERACTIVE = "a[href], button, input, select, textarea, [tabindex]";

// ---- contrast, as WCAG 2.2 defines it ----
const channels = (text) => { // of rgb(1, 2, 3), rgba(1, 2, 3, 0.5) or #010203: [1, 2, 3, alpha]
  const numbers = text[0] === "#" ? [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16))
    : text.match(/[0-9.]+/g).map(Number);
  return [...numbers, 1].slice(0, 4);
};
const over = (front, back) =>
  [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
const luminance = (color) =>
  sum([0.2126, 0.7152, 0.0722].map((weight, i) => weight * linear(color[i] / 255)));
function ratio(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((x, y) => x - y);
  return (light + 0.05) / (dark + 0.05);
}
function behind(element) { // the colours of the element and its ancestors, one over the other
  if (!element) return [255, 255, 255, 1];
  const own = channels(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, behind(element.parentElement));
}
function check_words(visible, tell) {
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const with_words = new Set();
  while (words.nextNode()) {
    if (words.currentNode.data.trim()) with_words.add(words.currentNode.parentElement);
  }
  for (const e of visible.filter((e) => with_words.has(e) || e.matches("input[type=number]"))) {
    const style = getComputedStyle(e), size = parseFloat(style.fontSize), back = behind(e);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const got = ratio(over(channels(style.color), back), back);
    if (got < (large ? 3 : 4.5)) tell("contrast", e, got.toFixed(2));
  }
}
function check_canvases(tell) { // words against what was painted there before them
  const proto = CanvasRenderingContext2D.prototype, {fillText} = proto;
  proto.fillText = function (text, x, y) {
    const half = this.measureText(text).width / 2 * ({left: 1, right: -1}[this.textAlign] || 0);
    const at = this.getTransform().transformPoint({x, y});
    const pixel = this.getImageData(Math.floor(at.x + half), Math.floor(at.y), 1, 1);
    const [r, g, b, alpha] = pixel.data;
    const back = over([r, g, b, alpha / 255], behind(document.body));
    const got = ratio(channels(this.fillStyle), back);
    if (got < 4.5) tell("contrast on canvas", this.canvas, `${text} ${got.toFixed(2)}`);
    fillText.call(this, text, x, y);
  };
  runs = {}; // so that the pipelines are painted again
  draw_all();
  Object.assign(proto, {fillText});
}

// ---- names, roles, structure ----
const own_words = (label) =>
  [...label.childNodes].filter((node) => node.nodeType === 3).map((node) => node.textContent);
function name_of_control(e) { // its label's words count, but not its own options or value
  const inside = e.matches("input, select, textarea, canvas") ? "" : e.textContent;
  return [e.getAttribute("aria-label"), ...[...e.labels || []].flatMap(own_words), inside].find(
    (words) => words?.trim());
}
function check_element(e, tell) {
  const role = e.getAttribute("role"), label = e.getAttribute("aria-label");
  if (role && !ROLES.has(role)) tell("role", e, role);
  if (["img", "application", "region"].includes(role) && !label) tell("role without a label", e);
  if (label && !role && !e.matches(`${INTERACTIVE}, nav`)) tell("label without a role", e);
  if (e.matches("canvas, img, svg") && !label && !e.alt) tell("picture without a label", e);
  if (e.tabIndex > 0) tell("tab order", e);
  if (e.matches("fieldset") && !e.querySelector("legend")?.textContent) tell("no legend", e);
  if (e.matches("th") && !e.textContent.trim()) tell("empty header", e);
  if (e.matches(INTERACTIVE) && !name_of_control(e)) tell("no name", e);
  if (e.matches(INTERACTIVE) && e.parentElement.closest("[role=img]")) tell("inside a picture", e);
  for (const name of ["aria-labelledby", "aria-describedby", "for"]) {
    if (e.hasAttribute(name) && !$(e.getAttribute(name))) tell("reference", e, name);
  }
}
function check_structure(every, visible, tell) {
  const ids = every.map((e) => e.id).filter(Boolean), regions = all("[role=region]");
  for (const list of [ids, regions.map(name_of_control)]) {
    if (new Set(list).size < list.length) tell("twice", document.body, list);
  }
  const levels = all("h1, h2, h3, h4, h5, h6").map((e) => +e.tagName[1]);
  if (levels.filter((n) => n === 1).length !== 1) tell("one h1", document.body);
  if (levels.some((n, i) => n > (levels[i - 1] || 0) + 1)) tell("headings", document.body, levels);
  const landmarks = "main, nav, header, footer";
  for (const e of visible.filter((e) => !e.closest(landmarks) && !e.querySelector(landmarks))) {
    if (e.textContent.trim()) tell("outside of a landmark", e);
  }
  if (!document.documentElement.lang || !document.title) tell("language and title", document.body);
}
function check_focus(visible, tell) {
  for (const e of visible.filter((e) => e.matches(INTERACTIVE) && e.tabIndex === 0)) {
    e.focus();
    const {outlineStyle, outlineWidth} = getComputedStyle(e);
    if (document.activeElement !== e) tell("takes no focus", e);
    else if (outlineStyle === "none" || parseFloat(outlineWidth) < 2) tell("focus not seen", e);
  }
  document.activeElement.blur();
}

// ---- everything, in light and in dark ----
function faults() {
  const found = new Set();
  const tell = (rule, e, more = "") =>
    found.add(`${rule}: ${e.id || e.outerHTML.slice(0, 60)} ${more}`);
  const every = all("body *").filter((e) => !e.matches("script, style, noscript, noscript *"));
  const visible = every.filter((e) => e.checkVisibility() && !e.matches("option"));
  for (const e of every) check_element(e, tell);
  check_structure(every, visible, tell);
  check_words(visible, tell);
  check_canvases(tell);
  check_focus(visible, tell);
  return [...found];
}
function darken() { // as if the system had asked for dark colours
  const [sheet] = document.styleSheets, rules = [...sheet.cssRules];
  const dark = rules.filter((rule) => rule.media?.mediaText.includes("color-scheme: dark"));
  for (const rule of dark.flatMap((rule) => [...rule.cssRules])) {
    sheet.insertRule(rule.cssText, sheet.cssRules.length);
  }
  document.documentElement.style.colorScheme = "dark";
  palette = {};
}
function audit() {
  const settings = ["", "rh=14&rn=8&t=60&ec=1.5&eu=1&aa=all-to-all&ol=F",
    "cm=gpt3-13b&tp=3&an=8&ah=3"];
  const visit = (setting) => {
    from_address(`#${setting}`);
    return faults();
  };
  const light = settings.flatMap(visit);
  darken();
  return {light, dark: settings.flatMap(visit)};
}
