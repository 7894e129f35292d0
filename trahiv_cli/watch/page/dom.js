// The few ways in which the page is changed. Texts are only ever set as text.

export const $ = (id) => document.getElementById(id);

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function el(name, className = "", ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// Keeps a list of nodes for items: those that stay are only updated, so that nothing flickers or loses its focus.
export function keep(parent, items, make, update) {
  const known = (parent.known ??= new Map()), keys = new Set(items.map((item) => item.key));
  for (const [key, node] of known) {
    if (!keys.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    let node = known.get(item.key);
    if (!node) known.set(item.key, (node = make(item)));
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
}

// Rows of a table from texts, one a cell; `classes` are those of the columns.
export function keepRows(body, items, classes, texts, update = () => {}) {
  const make = () => el("tr", "", ...classes.map((one) => el("td", one)));
  keep(body, items, make, (row, item) => {
    texts(item).forEach((text, i) => put(row.cells[i], text));
    update(row, item);
  });
}
