module.exports = async () => {
  throw new TypeError("nobody is perfect");
};
