module.exports = () => {
  throw new Error("before there was a promise");
};
