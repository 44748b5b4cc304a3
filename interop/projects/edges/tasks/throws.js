class Refused extends Error {
  name = "Refused";
}

const VALUES = {
  error: new Error("plain"),
  type_error: new TypeError("wrong type"),
  "own class": new Refused("by its own class"),
  "with a cause": new Error("outer", { cause: new Error("inner") }),
  "many lines": new Error("first\nsecond"),
  aggregate: new AggregateError([new Error("one"), new Error("two")], "several"),
  "without a message": new Error(),
  "message of another type": Object.assign(new Error(), { message: 42 }),
  undefined: undefined,
  null: null,
  text: "only text",
  "empty text": "",
  number: 7,
  object: { message: "from an object" },
  "object without a message": { code: 1 },
};

module.exports = async ({ what, rejects }) => {
  if (rejects) return Promise.reject(VALUES[what]);
  throw VALUES[what];
};
