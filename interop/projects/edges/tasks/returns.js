const VALUES = {
  nothing: () => undefined,
  number: () => 42,
  null: () => null,
  false: () => false,
  list: () => [1, Promise.resolve()],
  "promise of a list": async () => [1],
  thenable: () => ({ then: (resolve) => setImmediate(resolve, 1) }),
  "thenable that fails": () => ({ then: (_, reject) => setImmediate(reject, new Error("thenable")) }),
  "error that is not thrown": () => new Error("returned"),
  "promise in a promise": async () => (async () => { throw new Error("nested"); })(),
};

module.exports = ({ what }) => VALUES[what]();
