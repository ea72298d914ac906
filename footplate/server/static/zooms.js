// The zoomed part of each x axis, shared by all charts of a view.

export class Zooms {
  #ranges = new Map();
  #listeners = new Set();

  /** The part of an axis that is shown, as [from, to]; undefined if all of it is shown. */
  get(axis) {
    return this.#ranges.get(axis);
  }

  /** Show a part of an axis, or all of it if `range` is null. */
  set(axis, range) {
    if (range) this.#ranges.set(axis, range);
    else this.#ranges.delete(axis);
    for (const listener of this.#listeners) listener();
  }

  /** Call a function after each change. Returns a function that ends this. */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}
