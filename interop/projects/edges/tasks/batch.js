const later = (action) => new Promise((resolve, reject) => setImmediate(() => action(resolve, reject)));

const OF_ITEM = {
  fine: () => undefined,
  promise: () => later((resolve) => resolve()),
  fails: (item) => later((_, reject) => reject(new Error(`no ${item.n}`))),
  "fails with text": () => later((_, reject) => reject("text")),
  "fails with nothing": () => later((_, reject) => reject()),
};

// Its first item may say what becomes of the whole.
module.exports = (items) => {
  const results = items.map((item) => OF_ITEM[item.as]?.(item));
  switch (items[0]?.whole) {
    case "too few": return results.slice(1);
    case "nothing": return undefined;
    case "throws": throw new Error("all of it");
    case "not a list": return 1;
    default: return Promise.resolve(results);
  }
};
