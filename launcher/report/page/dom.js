"use strict";
/* Elements and text. Text of a run reaches the page only as textContent. */
const mrl = {
  /* Element with attributes and children; a child that is a string becomes text. */
  element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  },

  svg(name, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  },

  /* Square of a colour for a legend. */
  swatch(color) {
    const square = mrl.svg("rect", { width: 10, height: 10, rx: 2 });
    square.style.fill = color;
    return mrl.svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, square);
  },

  /* Data of a block of the page; null if it has none. */
  data(name) {
    const block = document.getElementById(`data-${name}`);
    return block ? JSON.parse(block.textContent) : null;
  },

  colors: new Map(),

  /* Value of a variable of page.css. The page is loaded again when they change. */
  color(name) {
    if (!mrl.colors.has(name)) {
      mrl.colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    }
    return mrl.colors.get(name);
  },

  six_digits: new Intl.NumberFormat("en", { maximumSignificantDigits: 6 }),
  three_digits: new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }),

  number(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "share") return `${Number((value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0))}%`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
    return (size >= 1000 ? mrl.six_digits : mrl.three_digits).format(value);
  },

  /* Two significant digits. */
  short(value) {
    return Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2)));
  },
};
