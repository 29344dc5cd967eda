/** SVG elements and their attributes. */

export function make(name, attributes) {
  return set(document.createElementNS("http://www.w3.org/2000/svg", name), attributes);
}

export function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
