// Colour scales with monotonic lightness, readable with colour blindness and in print.

// From dark blue over green to yellow with evenly rising lightness, similar to viridis.
const STOPS = [
  [40, 11, 84], [51, 42, 116], [50, 71, 134], [43, 99, 140], [35, 127, 140], [37, 154, 131], [72, 180, 111],
  [128, 203, 80], [192, 220, 52], [249, 232, 74],
];
// On paper a larger weight is darker.
const INK = [[255, 255, 252], [205, 212, 205], [140, 158, 165], [70, 92, 120], [8, 12, 40]];
// Blue for negative, orange for positive differences, both darker or both lighter than the middle.
const BOTH = {
  light: [[5, 60, 120], [60, 120, 185], [150, 190, 225], [246, 246, 244], [240, 190, 130], [205, 115, 40], [130, 55, 5]],
  // On paper without colours, lightness has to distinguish negative from positive.
  print: [[0, 20, 60], [50, 80, 120], [105, 125, 145], [160, 160, 160], [200, 180, 150], [232, 212, 175], [255, 246, 225]],
  dark: [[150, 205, 255], [80, 150, 215], [35, 80, 130], [24, 28, 34], [115, 65, 20], [205, 120, 45], [255, 200, 140]],
};
const LEVELS = 256;
const SMALLEST = 1e-5;

export const SCALES = {
  root: {name: "square root", place: Math.sqrt, ticks: [0, 0.01, 0.1, 0.25, 0.5, 1]},
  linear: {name: "linear", place: (weight) => weight, ticks: [0, 0.25, 0.5, 0.75, 1]},
  log: {
    name: "logarithm", place: (weight) => Math.max(0, 1 - Math.log10(weight) / Math.log10(SMALLEST)),
    ticks: [0.00001, 0.001, 0.1, 1],
  },
};

function table(stops) {
  const made = new Uint32Array(LEVELS);
  const bytes = new Uint8ClampedArray(made.buffer);
  for (let level = 0; level < LEVELS; level++) {
    const place = (level / (LEVELS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      bytes[level * 4 + channel] = stops[low][channel] + (stops[low + 1][channel] - stops[low][channel]) * (place - low);
    }
    bytes[level * 4 + 3] = 255;
  }
  return made;
}

const WEIGHTS = {light: table(STOPS), print: table(INK), dark: table(STOPS)};
const SIGNED = {light: table(BOTH.light), print: table(BOTH.print), dark: table(BOTH.dark)};
const FORBIDDEN = {light: [226, 229, 234], print: [255, 255, 255], dark: [44, 50, 59]};

export function printing() {
  return document.documentElement.hasAttribute("data-print");
}

export function theme() {
  if (printing()) return "print";
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

// A function from a weight, or NaN for a forbidden pair, to a pixel as one number.
export function painterOf(scale, signed = false) {
  const {place} = SCALES[scale];
  const bytes = new Uint8ClampedArray([...FORBIDDEN[theme()], 255]);
  const forbidden = new Uint32Array(bytes.buffer)[0];
  const level = (part) => Math.min(LEVELS - 1, Math.max(0, Math.round(part * (LEVELS - 1))));
  const weights = WEIGHTS[theme()];
  if (!signed) return (weight) => (Number.isNaN(weight) ? forbidden : weights[level(place(Math.max(weight, 0)))]);
  const both = SIGNED[theme()];
  return (weight) => Number.isNaN(weight) ? forbidden
    : both[level(0.5 + 0.5 * Math.sign(weight) * place(Math.abs(weight)))];
}

export function css(pixel) {
  return `rgb(${pixel & 255}, ${(pixel >> 8) & 255}, ${(pixel >> 16) & 255})`;
}

// Black or white, whichever has the higher contrast with a pixel.
export function inkOn(pixel) {
  const light = 0.2126 * (pixel & 255) + 0.7152 * ((pixel >> 8) & 255) + 0.0722 * ((pixel >> 16) & 255);
  return light > 115 ? "#101418" : "#ffffff";
}

export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
